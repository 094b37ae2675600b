"""Seeded faults at every seam of an engine's tiers: copies that are late, lost, torn, stale or
doubled, a disk that is full or breaks, a source that lies. Every answer is what it is alone, no
block is lost, and nobody waits for ever.

`python -m tests.simulation.tier_faults --seeds 10000`; one seed takes the same steps every time: `…
--first 17`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, NamedTuple

import pytest
import typer

from headwater.bench.program import run_program
from headwater.engine_core.config import EVICTIONS, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedTiming
from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.kv.disk import disk_blocks
from headwater.engine_core.kv.disk.disk_blocks import DiskBlocks
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.system.lanes import Job
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.lying_source import LyingSource
from tests.simulation.files_twin import FilesTwin
from tests.simulation.late_saves import LateSavesExecutor
from tests.simulation.seeds import First, Seeds, run_seeds

BLOCK_SIZE = 16
MAX_MODEL_LEN = 96
MODEL = SimulatedModel(vocab_size=50, first_token_id=3)
LEADS = [[(start + 7 * i) % 50 for i in range(80)] for start in range(2)]
NAMESPACES = (b"a" * 16, b"b" * 16)
MOST_STEPS = 400
"""A seed takes some 25."""


class Pace(NamedTuple):
    """How long a seed lasts. Of each tuple it draws one."""

    num_rounds: int = 3
    """Number of rounds of requests."""
    num_requests: tuple[int, ...] = (1, 2)
    """Requests of a round; a request may have several choices."""
    prompt_lens: tuple[int, ...] = (9, 50, 64, 79)
    budgets: tuple[int, ...] = (20, 60, 200)
    """Most tokens of a step."""
    answer_lens: tuple[int, ...] = (1, 1, 2, 9)
    """Most tokens of an answer."""
    pauses: tuple[int, ...] = (0, 4, 9)
    """Steps between two rounds."""
    load_polls: tuple[int, ...] = (0, 3, 40)
    """Most polls that a load from elsewhere takes."""
    num_choices: tuple[int, ...] = (1, 1, 1, 3)
    """Answers to a request."""
    alternates: bool = False
    """Whether the prompts of a round begin otherwise than those of the round before, whose blocks
    they evict."""


WHOLE = Pace()
BRIEF = Pace(
    num_rounds=3,
    num_requests=(1, 1, 1, 2),
    prompt_lens=(64, 79, 79),
    budgets=(60, 200, 200, 200),
    answer_lens=(1, 1, 2),
    pauses=(4, 6),
    load_polls=(0, 3, 3),
    num_choices=(1, 1, 1, 1, 1, 3),
    alternates=True,
)
"""Prompts that come again soon, in few steps."""


class Pages(NamedTuple):
    """Pages of a block, and of a state set."""

    windows: tuple[int, ...]
    state_pages: int = 0
    has_latents: bool = False

    @property
    def pages_a_block(self) -> int:
        return len(self.windows) + self.state_pages

    @property
    def model(self) -> SimulatedModel:
        return replace(
            MODEL,
            windows=self.windows,
            num_state_units=num_units(self.state_pages),
            has_latents=self.has_latents,
        )


ONE_PAGE = Pages((0,))
PAGES = {
    "windows": Pages((0, 20, 20)),
    "states": Pages((0,), 4),
    "window-and-states": Pages((0, 40), 2),
    "latents": Pages((0,), has_latents=True),
}


class FaultyLane:
    """Runs waiting jobs some time: in order, or in any."""

    def __init__(self, rng: random.Random, *, in_order: bool) -> None:
        self._rng = rng
        self._in_order = in_order
        self._jobs: list[Job] = []

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def run(self, most: int) -> None:
        for _ in range(min(most, len(self._jobs))):
            self._jobs.pop(0 if self._in_order else self._rng.randrange(len(self._jobs)))()


def in_place_of_threads(*lanes: FaultyLane) -> Callable[..., FaultyLane]:
    """Stands for the class of lanes: each call returns the next of `lanes`. A mock takes as long to
    make as some steps of an engine."""
    following = iter(lanes)
    return lambda *_, **__: next(following)


@dataclass(slots=True)
class Answer:
    new: NewRequest
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class Outcome:
    """What a seed saw."""

    num_steps: int = 0
    num_hits: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    num_copied_blocks: int = 0
    num_faults: int = 0
    num_damaged: int = 0
    is_disk_off: bool = False


@lru_cache(maxsize=4096)
def expected(
    model: SimulatedModel, lead: int, length: int, seed: int, choice_index: int, max_tokens: int
) -> list[int]:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens)
    return expected_tokens(
        model,
        LEADS[lead][:length],
        sampling,
        choice_index=choice_index,
        max_model_len=MAX_MODEL_LEN,
    )


class Run:
    """One seed: an engine with all tiers, its requests, and what befalls them."""

    def __init__(
        self, seed: int, pace: Pace = WHOLE, pages: Pages | None = None, eviction: str = ""
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.pace = pace
        given = pages or Pages(((0, 0, 0, 20, 40)[seed % 5],))
        num_spare = rng.choice([0, 0, 0, 3])
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            page_windows=given.windows,
            state_pages=given.state_pages,
            num_blocks=1000,
            num_host_blocks=rng.choice([0, 0, 0, 12]) * given.pages_a_block,
            num_staged_blocks=rng.choice([2, 5, 12]) * given.pages_a_block,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=rng.choice([1, 3, 6]),
            spare_rows=rng.choice([0, 2]),
            max_num_batched_tokens=rng.choice(pace.budgets),
            async_depth=rng.randint(1, 4),
        )
        # Drawn apart, so that seeds go on as they did without them.
        self.hints = random.Random(f"eviction of {seed}")
        self.config = replace(
            self.config,
            num_blocks=self.config.fewest_blocks + num_spare * len(given.windows),
            eviction=eviction or self.hints.choice(EVICTIONS),
            attention_pivot=self.hints.choice([0, 40]),
        )
        self.model = given.model
        timing = SimulatedTiming(late_polls=rng.choice([0, 2]))
        # Drawn apart, so that seeds go on as they did without it.
        num_looks = random.Random(f"saves of {seed}").choice([0, 0, 3])
        self.executor = LateSavesExecutor(self.config, self.model, timing, num_looks=num_looks)
        self.files = FilesTwin(
            rng.choice([0, 5, 40, 40, 40]) * given.pages_a_block,
            rng,
            fault_chance=rng.choice([0.0, 0.3, 0.6]),
        )
        self.num_steps = 0
        self.num_rounds = 0
        self.peer = self._peer(self.executor._cache.blocks) if rng.random() < 0.5 else None
        self.writes = FaultyLane(rng, in_order=True)
        self.reads = FaultyLane(rng, in_order=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_blocks, "ThreadLane", in_place_of_threads(self.writes, self.reads))
            self.engine = Engine(
                self.config,
                self.executor,
                clock=lambda: float(self.num_steps),
                disk_files=self.files,
                sources=() if self.peer is None else (self.peer,),
            )
        self.answers: dict[int, Answer] = {}
        self.reported = set[bytes]()
        self.hits = Counter[str]()

    def _peer(self, kv_blocks: UInt64Array) -> LyingSource:
        most_polls = self.rng.choice(self.pace.load_polls)
        protect = self.executor.saves.protect
        return LyingSource(
            kv_blocks,
            self.rng.randrange(1000),
            most_polls=most_polls,
            is_local=False,
            protect=protect,
        )

    @property
    def disk(self) -> DiskBlocks:
        assert self.engine._tiers.disk is not None
        return self.engine._tiers.disk

    def run(self) -> Outcome:
        for _ in range(self.pace.num_rounds):
            self._add_some()
            for _ in range(self.rng.choice(self.pace.pauses)):
                if self._has_work:
                    self._step()
            self._harm()
            self.num_rounds += 1
        while self._has_work:
            assert self.num_steps < MOST_STEPS, f"no request goes on: {self._waiting()}"
            self._step()
        self._check_end()
        load = self.engine.load()
        return Outcome(
            num_steps=self.num_steps,
            num_hits=self.hits,
            num_preemptions=load.num_preemptions,
            num_copied_blocks=load.num_copied_blocks,
            num_faults=self.files.num_faults,
            num_damaged=self.disk.use.num_damaged,
            is_disk_off=bool(self.disk.use.failure),
        )

    @property
    def _has_work(self) -> bool:
        # A read of a load that was given up ends when no request waits for it any more.
        return self.engine.waits_for is not WaitsFor.WORK or self.reads.has_jobs

    def _add_some(self) -> None:
        for _ in range(self.rng.choice(self.pace.num_requests)):
            lead = self.rng.randrange(len(LEADS))
            if self.pace.alternates:
                lead = self.num_rounds % len(LEADS)
            length = self.rng.choice(self.pace.prompt_lens)
            sampling = SamplingParams(
                seed=self.rng.randrange(2), max_tokens=self.rng.choice(self.pace.answer_lens)
            )
            count = self.rng.choice(self.pace.num_choices)
            tenant = self.hints.choice("ttu")
            session = self.hints.choice(["", "s"])
            keep_seconds = self.hints.choice([0.0, 0.0, 20.0])
            for choice_index in range(count):
                key = len(self.answers)
                new = NewRequest(
                    key=key,
                    prompt_ids=LEADS[lead][:length],
                    output_ids=[],
                    sampling=sampling,
                    choice_index=choice_index,
                    namespace=NAMESPACES[self.rng.random() < 0.2] if count == 1 else NAMESPACES[0],
                    tenant=tenant,
                    session=session,
                    keep_seconds=keep_seconds,
                    forks=count > 1,
                )
                self.answers[key] = Answer(new)
                self.engine.add(new)

    def _harm(self) -> None:
        for _ in range(self.rng.choice([0, 2])):
            self.files.spoil()
        if self.rng.random() < 0.2:
            key = self.rng.randrange(len(self.answers))
            self.answers[key].is_cancelled |= not self.answers[key].has_ended
            self.engine.cancel(key)
        chance = self.rng.random()
        self.files.is_full |= chance < 0.05
        self.files.is_broken |= 0.05 < chance < 0.1

    def _step(self) -> None:
        self.num_steps += 1
        # Late at first, but every job has its turn.
        self.writes.run(self.rng.choice([0, 30, 30]))
        self.reads.run(self.rng.choice([0, 1, 30]))
        if (output := self.engine.step()) is not None:
            self._receive(output)
        if self.num_steps % 5 == 0:
            self._check_blocks()

    def _receive(self, output: StepOutput) -> None:
        tokens = iter(output.token_ids)
        for key, first, count in zip(
            output.keys, output.first_index, output.num_tokens, strict=True
        ):
            answer = self.answers[key]
            assert first == len(answer.tokens), "a token twice, or none"
            answer.tokens += [next(tokens) for _ in range(count)]
        for started in output.starts:
            self.hits.update(started.cached_by_tier)
        for finished in output.finishes:
            assert not self.answers[finished.key].has_ended, "two ends"
            self.answers[finished.key].has_ended = True
        if (events := output.cache_events) is not None:
            assert self.reported >= set(events.removed), (
                "blocks reported as lost were never reported as stored"
            )
            self.reported -= set(events.removed)
            for chain in events.stored:
                assert self.reported.isdisjoint(chain.hashes), (
                    "a block was reported as stored twice"
                )
                self.reported.update(chain.hashes)

    def _check_blocks(self) -> None:
        """Blocks are held by rows, by loads and by copies in flight, and by nobody else; slots by
        the disk's saves and loads."""
        scheduler = self.engine._scheduler
        blocks = scheduler.blocks
        held = Counter(blocks._forks.held_pages)
        for row, request in enumerate(scheduler.rows.table.requests):
            if request is not None:
                held.update(blocks.pages_of(row))
        for load in blocks._loads._open.values():
            held.update(load.held.pages + load.here + load.blocks)
        counts = blocks._pool.ref_counts
        assert [held[block] for block in range(self.config.num_blocks)] == counts, (
            "blocks are not conserved"
        )
        assert len(set(self.disk._free_slots)) == len(self.disk._free_slots), "a slot is free twice"

    def _check_end(self) -> None:
        self._check_blocks()
        for key, answer in self.answers.items():
            new = answer.new
            lead = next(i for i, each in enumerate(LEADS) if each[0] == new.prompt_ids[0])
            seed = new.sampling.seed
            most = new.sampling.max_tokens
            asked = lead, len(new.prompt_ids), seed, new.choice_index, most
            known = expected(self.model, *asked)
            assert answer.has_ended, f"request {key} has no end"
            assert answer.tokens == (
                known[: len(answer.tokens)] if answer.is_cancelled else known
            ), f"request {key}"
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0), (
            "blocks are left"
        )
        assert len(self.disk._free_slots) == self.config.num_staged_blocks, "slots are left"
        assert set(self.engine.cached_block_hashes()) == self.reported, (
            "the index was told something else"
        )

    def _waiting(self) -> list[int]:
        return [key for key, answer in self.answers.items() if not answer.has_ended]


def run_seed(
    seed: int, pace: Pace = WHOLE, pages: Pages | None = None, eviction: str = ""
) -> Outcome:
    """Raises `AssertionError`. With fewer rounds the steps are the same up to the last of them.
    `pages`: None: of one group, whose window the seed draws. `eviction`: empty: the seed draws
    it."""
    return Run(seed, pace, pages, eviction).run()


def main(
    seeds: Seeds = 2000,
    first: First = 0,
    brief: Annotated[bool, typer.Option(help="as in `make test`")] = False,
    rounds: Annotated[int, typer.Option(help="of requests; 0: of the seeds' pace")] = 0,
    pages: Annotated[str, typer.Option(help="a name of PAGES")] = "",
    eviction: Annotated[str, typer.Option(help="; empty: each seed draws one")] = "",
) -> None:
    """Run seeds one after another; the first that breaks ends it."""
    logging.disable(logging.ERROR)
    pages_of = PAGES[pages] if pages else None
    pace = BRIEF if brief else WHOLE
    pace = pace._replace(num_rounds=rounds or pace.num_rounds)
    run_seeds(lambda seed: run_seed(seed, pace, pages_of, eviction), first, seeds)


if __name__ == "__main__":
    run_program(main)
