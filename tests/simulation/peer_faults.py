"""Seeded faults between engines that pull blocks from each other: copies that are late, lost, torn,
stale, foreign or doubled, engines that come back as another incarnation, leases that end too early,
prefetches that end at any time. Answers and blocks stay whole.

`python -m tests.simulation.peer_faults --seeds 10000`; one seed takes the same steps every time: `…
--first 17`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Annotated, NamedTuple

import numpy as np
import typer

from headwater.bench.program import run_program
from headwater.engine_core.kv.prefetch import NewPrefetch
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.request import Holder, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.simulation.peer_twins import Answer, LinkTwin, Replica
from tests.simulation.seeds import First, Seeds, run_seeds
from tests.simulation.tier_faults import (
    BLOCK_SIZE,
    LEADS,
    NAMESPACES,
    ONE_PAGE,
    PAGES,
    Pages,
    expected,
)

NUM_ENGINES = 2
MOST_STEPS = 1500
"""A seed takes some 60, one of many rounds some 200."""


class Pace(NamedTuple):
    """How long a seed lasts. Of each tuple it draws one."""

    most_rounds: int = 14
    """Most rounds of requests."""
    prompt_lens: tuple[int, ...] = (9, 50, 64, 79)
    answer_lens: tuple[int, ...] = (1, 2, 9)


WHOLE = Pace()
BRIEF = Pace(2, (50, 64, 79), (1, 1, 2))
"""A third of a whole seed's steps, in which as many blocks are pulled."""


@dataclass(slots=True)
class Outcome:
    """What a seed saw."""

    num_steps: int
    num_pulled_tokens: int
    num_prefetched_tokens: int
    """Pulled tokens that came before their request did."""
    num_prefetches: int
    num_lent_tokens: int
    num_lent_from_tiers: int
    """Blocks."""
    num_direct: int
    """Pulls that were told places."""
    num_ahead: int
    """Pulls that copied before they were told places."""
    num_compared: int
    """Pulls that needed no second claim."""
    num_discarded: int
    num_preemptions: int
    num_deaths: int
    faults: Counter[str]


class Run:
    """One seed: engines, requests that name others as holders of their prompts, and what befalls
    them."""

    def __init__(
        self,
        seed: int,
        pace: Pace,
        *,
        copies_published: bool = False,
        pages: Pages = ONE_PAGE,
    ) -> None:
        """`copies_published`: engines copy out of each other's KV caches and publish their blocks,
        in every seed."""
        self.pace = pace
        self.pages = pages
        self.rng = rng = random.Random(seed)
        # Draws of their own, which leave the steps of a seed as they are.
        self.race_rng = random.Random(f"races of {seed}")
        self._always = copies_published
        self.most_steps = MOST_STEPS
        self.publishes = self.race_rng.random() < 0.7 or copies_published
        chance = rng.choice([0.0, 0.3, 0.7])
        most_delay = rng.choice([0, 2, 50])
        self.link = LinkTwin(rng, self.race_rng, fault_chance=chance, most_delay=most_delay)
        # Draws of its own, and none in half of the seeds, whose steps they leave as they are
        # without prefetches.
        self.prefetch_rng = random.Random(f"prefetches of {seed}")
        self.prefetch_chance = self.prefetch_rng.choice([0.4, 0.8]) if seed % 2 else 0.0
        self.epochs = count(1)
        self.keys = count()
        self.is_direct = rng.random() < 0.5 or copies_published
        # What is published is read by a second pull from the same engine, and by later ones.
        is_long = self.publishes and self.is_direct and self.race_rng.random() < 0.5
        num_rounds, self.death_chance = (14, 0.05) if is_long else (5, 0.2)
        self.num_rounds = min(num_rounds, pace.most_rounds)
        self.answers: list[Answer] = []
        self.prefetches: list[tuple[Replica, int]] = []
        self.dead: list[Replica] = []
        self.link.replicas = [self._start(number) for number in range(NUM_ENGINES)]

    def _start(self, number: int) -> Replica:
        # One that is of another host is beside one that is not, in some seeds.
        is_direct = self.is_direct and (self.rng.random() < 0.9 or self._always)
        publishes = self.publishes and (self.race_rng.random() < 0.9 or self._always)
        return Replica(
            number,
            next(self.epochs),
            self.rng,
            self.link,
            is_direct=is_direct,
            publishes=publishes,
            pages=self.pages,
        )

    def run(self) -> Outcome:
        for _ in range(self.num_rounds):
            self._add_some()
            for _ in range(self.rng.choice([1, 6, 15])):
                self._step()
            if self.rng.random() < self.death_chance:
                self._kill(self.rng.choice(self.link.replicas))
            if self.rng.random() < 0.1:
                self._give_up_any()
            if self.prefetch_rng.random() < 0.3:
                self._end_some_prefetches()
        while self._has_work:
            assert self.link.now < self.most_steps, (
                f"no request goes on: {sum(not each.has_ended for each in self.answers)}"
            )
            self._step()
        self._check_end()
        everyone = [*self.link.replicas, *self.dead]
        return Outcome(
            num_steps=self.link.now,
            num_pulled_tokens=sum(each.peers.num_pulled * BLOCK_SIZE for each in everyone),
            num_prefetched_tokens=sum(each.prefetches.num_blocks * BLOCK_SIZE for each in everyone),
            num_prefetches=len(self.prefetches),
            num_lent_tokens=sum(each.leases.num_lent * BLOCK_SIZE for each in everyone),
            num_lent_from_tiers=sum(each.leases.num_lent_from_tiers for each in everyone),
            num_direct=self.link.num_direct,
            num_ahead=self.link.num_ahead,
            num_compared=self.link.num_compared,
            num_discarded=sum(each.peers.num_discarded for each in everyone),
            num_preemptions=sum(each.engine.load().num_preemptions for each in everyone),
            num_deaths=len(self.dead),
            faults=self.link.faults,
        )

    @property
    def _has_work(self) -> bool:
        return not self.link.is_idle or any(each.has_work for each in self.link.replicas)

    def _step(self) -> None:
        self.link.advance()
        for replica in self.link.replicas:
            if self.rng.random() < 0.8:
                replica.step(self.rng)
            if self.link.now % 5 == 0:
                replica.check_blocks()

    def _add_some(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            lead = self.rng.randrange(len(LEADS))
            length = self.rng.choice(self.pace.prompt_lens)
            new = NewRequest(
                key=next(self.keys),
                prompt_ids=LEADS[lead][:length],
                output_ids=[],
                sampling=SamplingParams(
                    seed=self.rng.randrange(2), max_tokens=self.rng.choice(self.pace.answer_lens)
                ),
                namespace=NAMESPACES[self.rng.random() < 0.2],
                tenant="t",
            )
            self.answers.append(Answer(new))
            replica = self.rng.choice(self.link.replicas)
            self._send(self.answers[-1], replica)
            if self.prefetch_rng.random() < self.prefetch_chance:
                self._prefetch(new, replica)

    def _prefetch(self, new: NewRequest, owner: Replica) -> None:
        """The other replica pulls the prompt's blocks while `owner` computes them. The request may
        come there as well, or the prefetch may end before that."""
        other = self.link.replicas[(owner.number + 1) % NUM_ENGINES]
        number = next(self.keys)
        prefetch = NewPrefetch(
            number=number,
            hashes=block_hashes(new.namespace, np.array(new.prompt_ids, np.int32), BLOCK_SIZE),
            namespace=new.namespace,
            tenant=new.tenant,
            holder=Holder(
                address=str(owner.number),
                epoch=owner.epoch - (self.prefetch_rng.random() < 0.05),
                num_tokens=len(new.prompt_ids),
            ),
            chunk_blocks=owner.config.max_num_batched_tokens // BLOCK_SIZE,
            seconds=self.prefetch_rng.choice([3.0, 60.0]),
        )
        other.engine.prefetch(prefetch)
        self.prefetches.append((other, number))
        if self.prefetch_rng.random() < 0.5:
            self.answers.append(Answer(new))
            self.link._later(partial(self._hand_over, self.answers[-1], other))

    def _hand_over(self, answer: Answer, replica: Replica) -> None:
        """To the incarnation that is there now."""
        self._send(answer, self.link.replicas[replica.number])

    def _end_some_prefetches(self) -> None:
        """Any of them, one that has ended included."""
        for replica, number in self.prefetch_rng.sample(self.prefetches, len(self.prefetches) // 3):
            replica.end_prefetch(number)

    def _send(self, answer: Answer, replica: Replica) -> None:
        """To a replica, with what may be known of another one."""
        other = self.link.replicas[(replica.number + 1) % NUM_ENGINES]
        known = len(answer.new.prompt_ids) + len(answer.tokens)
        holder = Holder(
            address=str(other.number),
            epoch=other.epoch - (self.rng.random() < 0.05),
            num_tokens=self.rng.choice([known, known, known + 40, 16]),
        )
        new = replace(answer.new, key=next(self.keys), output_ids=list(answer.tokens))
        if self.rng.random() < 0.9:
            new = replace(new, holder=holder)
        answer.new = new
        replica.answers[new.key] = answer
        replica.engine.add(new)

    def _kill(self, victim: Replica) -> None:
        """The engine dies; its answers go on at any replica."""
        self.dead.append(victim)
        self.link.died(victim)
        self.link.replicas[victim.number] = self._start(victim.number)
        for answer in victim.answers.values():
            if not answer.has_ended:
                self._send(answer, self.rng.choice(self.link.replicas))

    def _give_up_any(self) -> None:
        """As a load does that takes too long: the request computes, and what still comes is
        discarded."""
        for replica in self.link.replicas:
            for load in replica.engine._scheduler.blocks._loads._open.values():
                load.give_up_at = 0.0

    def _check_end(self) -> None:
        for replica in self.link.replicas:
            replica.check_end()
        for answer in self.answers:
            new = answer.new
            lead = next(i for i, each in enumerate(LEADS) if each[0] == new.prompt_ids[0])
            known = expected(
                self.pages.model,
                lead,
                len(new.prompt_ids),
                new.sampling.seed,
                new.choice_index,
                new.sampling.max_tokens,
            )
            assert answer.has_ended, f"request {new.key} has no end"
            assert answer.tokens == known, f"request {new.key} has other tokens"


def run_seed(seed: int, pace: Pace = WHOLE, pages: Pages = ONE_PAGE) -> Outcome:
    """Raises `AssertionError`."""
    return Run(seed, pace, pages=pages).run()


def main(
    seeds: Seeds = 2000,
    first: First = 0,
    brief: Annotated[bool, typer.Option(help="as in `make test`")] = False,
    pages: Annotated[str, typer.Option(help=f"one of {', '.join(PAGES)}; none: one page")] = "",
) -> None:
    """Run seeds one after another; the first that breaks ends it."""
    pace = BRIEF if brief else WHOLE
    run_seeds(lambda seed: run_seed(seed, pace, PAGES.get(pages, ONE_PAGE)), first, seeds)


if __name__ == "__main__":
    run_program(main)
