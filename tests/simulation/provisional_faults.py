"""Seeded schedules of two engines, of which one has a single request at a time and pulls its blocks
from the other,
which goes on meanwhile: steps are launched behind copies that may be wrong, and no token of a wrong
one is said.

`python -m tests.simulation.provisional_faults --seeds 10000`; one seed takes the same steps every
time.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from headwater.bench.program import run_program
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.simulation.peer_faults import Run
from tests.simulation.peer_twins import Answer, Replica
from tests.simulation.seeds import First, Seeds, run_seeds
from tests.simulation.tier_faults import LEADS, NAMESPACES

NUM_ROUNDS = 8
MOST_STEPS = 20_000
"""A seed takes some 500, and a thousand more for each load that takes long."""


class CalmRun(Run):
    """One seed."""

    def __init__(self, seed: int, most_rounds: int = NUM_ROUNDS) -> None:
        super().__init__(seed, most_rounds, copies_published=True)
        self.num_rounds = most_rounds
        self.death_chance = 0.1
        self.prefetch_chance = 0.0
        self.most_steps = MOST_STEPS

    def _add_some(self) -> None:
        """A prompt is computed by one engine, then asked of the other one, while the first gets
        others."""
        self._finish()
        owner, puller = self.rng.sample(self.link.replicas, 2)
        lead = self.rng.randrange(len(LEADS))
        length = self.rng.choice([33, 50, 64, 79])
        self._ask(owner, lead, length)
        self._finish()
        # A prompt of 64 tokens fills its last block.
        self._ask(puller, lead, self.rng.choice([length, 64, 64, 79]))
        for _ in range(self.rng.choice([0, 1, 3])):
            # What begins otherwise takes the blocks.
            ask = partial(
                self._ask_incarnation, owner.number, self.rng.choice([lead, 1 - lead, 1 - lead]), 79
            )
            self.link._later(ask) if self.rng.random() < 0.5 else ask()

    def _ask(self, replica: Replica, lead: int, length: int) -> None:
        new = NewRequest(
            key=next(self.keys),
            prompt_ids=LEADS[lead][:length],
            output_ids=[],
            sampling=SamplingParams(
                seed=self.rng.randrange(2), max_tokens=self.rng.choice([1, 2, 9])
            ),
            namespace=NAMESPACES[0],
            tenant="t",
        )
        self.answers.append(Answer(new))
        self._send(self.answers[-1], replica)

    def _ask_incarnation(self, number: int, lead: int, length: int) -> None:
        self._ask(self.link.replicas[number], lead, length)

    def _finish(self) -> None:
        while self._has_work:
            assert self.link.now < self.most_steps, "no request goes on"
            self._step()


class Outcome(NamedTuple):
    """Numbers of steps that a seed saw."""

    num_provisional: int
    num_void: int
    """Provisional ones that were thrown away."""


def run_seed(seed: int) -> Outcome:
    """Raises `AssertionError`."""
    run = CalmRun(seed)
    run.run()
    steps = [each.engine._scheduler.provisional for each in (*run.link.replicas, *run.dead)]
    return Outcome(sum(each.num_steps for each in steps), sum(each.num_void for each in steps))


def main(seeds: Seeds = 2000, first: First = 0) -> None:
    """Run seeds one after another; the first that breaks ends it."""
    run_seeds(run_seed, first, seeds, summary)


def summary(outcomes: list[Outcome]) -> str:
    num_steps, num_void = (sum(each) for each in zip(*outcomes, strict=True))
    return f"{num_steps} provisional steps, {num_void} of them thrown away"


if __name__ == "__main__":
    run_program(main)
