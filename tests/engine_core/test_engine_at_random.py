"""The engine under random adds, cancels, credits and shortages, at every depth, against what should be.

What should be: every stream is what `expected_tokens` says it is alone, every plan keeps the executor's contract, and
when all is done nothing is held.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import DrawPlan, Int32Array, StepPlan, StepResult, Swapper
from headwater.engine_core.executors.simulated import (
    SimulatedExecutor,
    SimulatedModel,
    SimulatedTiming,
    expected_tokens,
)
from headwater.engine_core.prefix_hash import expected_cached_tokens
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput

MANY = 1 << 30
BLOCK_SIZE = 16
MAX_MODEL_LEN = 128
MODEL = SimulatedModel(vocab_size=40, first_token_id=3, eos_token_id=2, eos_probability=0.02)
NUM_WORDS = 2
LEADS = [list(range(start, start + 90)) for start in (0, 100)]


def grammar(answer: list[int]) -> Int32Array:
    """A mask that depends on the tokens before it; now and then the end of sequence is in it."""
    ids = np.arange(MODEL.vocab_size)
    allowed = (ids * 7 + len(answer) * 3 + sum(answer[-2:])) % 5 != 0
    allowed[2] = len(answer) % 9 == 4
    return np.packbits(np.resize(allowed, 32 * NUM_WORDS), bitorder="little").view(np.int32)


class CheckedExecutor:
    """The simulated executor behind a check of every plan against the contract."""

    def __init__(self, config: EngineConfig, late_polls: int) -> None:
        self.max_in_flight = 0
        self._config = config
        self._executor = SimulatedExecutor(config, MODEL, SimulatedTiming(late_polls=late_polls), verify_every=1)
        self._blocks: dict[int, dict[int, int]] = {}
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._num_prompt: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._draws: set[int] = set()
        # Of each step in flight: the row that may read a block, for all blocks.
        self._readers: deque[dict[int, set[int]]] = deque()
        # By row: blocks that plans said it writes.
        self._writable: dict[int, set[int]] = {}

    @property
    def swapper(self) -> Swapper | None:
        return self._executor.swapper

    def submit(self, plan: StepPlan) -> int:
        self._take_rows(plan)
        for row, idx, block in zip(plan.block_rows, plan.block_indices, plan.block_ids, strict=True):
            assert block != 0
            assert self._blocks[int(row)].setdefault(int(idx), int(block)) == block, "entries never change"
        written = set(plan.written_blocks(BLOCK_SIZE).tolist())
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self._writable.setdefault(row, set()).update({block} & written)
        rows = plan.rows.tolist()
        assert rows, "an empty step"
        assert len(set(rows)) == len(rows)
        assert plan.num_tokens <= self._config.max_num_batched_tokens
        readers: dict[int, set[int]] = {}
        writers: dict[int, int] = {}
        for i, row in enumerate(rows):
            start, end = int(plan.starts[i]), int(plan.starts[i] + plan.counts[i])
            assert not (plan.samples[i] and plan.holds[i])
            output_idx = int(plan.output_indices[i])
            self._advance_row(row, start, end, samples=bool(plan.samples[i]), output_idx=output_idx)
            if plan.row_steps is not None:
                assert (end, plan.samples[i]) == (start + 1, True), "several steps are of rows that decode"
                for i_step in range(1, int(plan.row_steps[i])):
                    self._advance_row(row, end, end + 1, samples=True, output_idx=output_idx + i_step)
                    end += 1
            if plan.holds[i]:
                assert end == self._known[row]
                self._held[row] = end
            for idx in range(-(-end // BLOCK_SIZE)):
                block = self._blocks[row][idx]
                readers.setdefault(block, set()).add(row)
                if (idx + 1) * BLOCK_SIZE > start:
                    assert writers.setdefault(block, row) == row, "two rows write a block"
                    assert block in self._writable[row], "written, and not said"
                    assert all(step.get(block, set()) <= {row} for step in self._readers), "written while listed"
        self._readers.append(readers)
        self.max_in_flight = max(self.max_in_flight, len(self._readers))
        assert len(self._readers) <= self._config.async_depth
        self._check_room()
        return self._executor.submit(plan)

    def draw(self, plan: DrawPlan) -> int:
        for row, position, output_idx in zip(plan.rows, plan.positions, plan.output_indices, strict=True):
            assert self._held.pop(int(row)) == position == self._known[int(row)]
            assert output_idx == position - self._num_prompt[int(row)]
            self._known[int(row)] += 1
        self._draws.add(plan.step)
        self._check_room()
        return self._executor.draw(plan)

    def _check_room(self) -> None:
        """Results and staged words have a place for each plan in flight, and no more."""
        assert len(self._readers) + len(self._draws) <= 2 * self._config.async_depth + 1

    def retire(self, handle: int) -> StepResult:
        if handle in self._draws:
            self._draws.remove(handle)
        else:
            self._readers.popleft()
        return self._executor.retire(handle)

    def is_ready(self, handle: int) -> bool:
        return self._executor.is_ready(handle)

    def close(self) -> None:
        self._executor.close()

    def _take_rows(self, plan: StepPlan) -> None:
        rows_in_flight = {row for step in self._readers for rows in step.values() for row in rows}
        for row in plan.released:
            assert row not in rows_in_flight
            del self._blocks[row]
            self._writable.pop(row, None)
            self._held.pop(row, None)
        for admitted in plan.admitted:
            assert admitted.row not in self._blocks, "the row is taken"
            self._blocks[admitted.row] = {}
            self._known[admitted.row] = len(admitted.token_ids)
            self._num_prompt[admitted.row] = admitted.num_prompt_tokens
            self._computed.pop(admitted.row, None)

    def _advance_row(self, row: int, start: int, end: int, *, samples: bool, output_idx: int) -> None:
        assert row in self._blocks
        assert row not in self._held, "computed before what it holds is drawn"
        assert start == self._computed.get(row, start), "no gap, nothing twice"
        assert start < end <= self._known[row], "only known tokens are computed"
        if row not in self._computed:
            assert start % BLOCK_SIZE == 0
        self._computed[row] = end
        if samples:
            assert end == self._known[row]
            assert output_idx == end - self._num_prompt[row]
            self._known[row] += 1
            assert self._known[row] <= MAX_MODEL_LEN


@dataclass
class Stream:
    """What should come of a request, and what came."""

    new: NewRequest
    answer: list[int]
    tokens: list[int]
    granted: int
    is_cancelled: bool = False
    cached_tokens: int | None = None
    reason: FinishReason | None = None
    num_scored: int = 0
    """Prompt positions whose log probabilities came."""


@dataclass
class Want:
    """The next mask of a row, and the step at which it is there."""

    key: int
    ticket: int
    index: int
    due: int


@dataclass
class Driver:
    """Talks to an engine and compares all it says."""

    config: EngineConfig
    late_polls: int
    mask_delay: int = 0
    """Steps that a mask takes, at most."""
    streams: dict[int, Stream] = field(default_factory=dict)
    cached: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.executor = CheckedExecutor(self.config, self.late_polls)
        self.masks = np.zeros((self.config.max_num_seqs, NUM_WORDS), np.int32)
        self.engine = Engine(self.config, self.executor, masks=self.masks)
        self.wanted: dict[int, Want] = {}
        """By row."""
        self.num_steps = 0

    def add(self, new: NewRequest) -> None:
        answer = expected_tokens(
            MODEL,
            new.prompt_ids,
            new.sampling,
            choice_index=new.choice_index,
            output_ids=new.output_ids,
            max_model_len=self.config.max_model_len,
            mask=grammar if new.has_grammar else None,
        )
        self.streams[new.key] = Stream(new, answer, list(new.output_ids), len(new.output_ids) + new.credit)
        self.engine.add(new)

    def cancel(self, key: int) -> None:
        if self.streams[key].reason is None:
            self.streams[key].is_cancelled = True
        self.engine.cancel(key)

    def add_credit(self, key: int, tokens: int) -> None:
        self.streams[key].granted += tokens
        self.engine.add_credit(key, tokens)

    def fill_masks(self, *, at_once: bool = False) -> None:
        """As the door would: also for requests that have ended, and again what is there."""
        filled = []
        for row, want in self.wanted.items():
            tokens = self.streams[want.key].tokens
            if len(tokens) >= want.index and (at_once or want.due <= self.num_steps):
                self.masks[row] = grammar(tokens)
                filled.append((row, want.ticket, len(tokens)))
                want.index = len(tokens) + 1
                want.due = self.num_steps + (want.key + want.index) % (self.mask_delay + 1)
        if filled:
            rows, tickets, indices = map(list, zip(*filled, strict=True))
            self.engine.masks_filled(rows, tickets, indices)

    @property
    def awaits_masks(self) -> bool:
        return self.engine._scheduler.table.awaits_masks

    def step(self) -> None:
        self.num_steps += 1
        self.fill_masks()
        if (output := self.engine.step()) is not None:
            self._hear(output)
        assert set(self.engine.cached_block_hashes()) == self.cached
        self._check_holds()

    def run(self) -> None:
        steps = iter(repeat(None, 5000))
        while self.engine.has_work() or self.awaits_masks:
            next(steps)
            # Nobody else may be there to wait for.
            self.fill_masks(at_once=not self.engine.has_work())
            self.step()

    def _hear(self, output: StepOutput) -> None:
        assert len(set(output.keys)) == len(output.keys)
        tokens = iter(output.token_ids)
        for start in output.starts:
            stream = self.streams[start.key]
            assert stream.cached_tokens is None
            stream.cached_tokens = start.cached_tokens
        for key, first_index, num_tokens in zip(output.keys, output.first_index, output.num_tokens, strict=True):
            stream = self.streams[key]
            assert stream.reason is None, "tokens after the end"
            assert not stream.is_cancelled
            assert stream.cached_tokens is not None, "tokens before the start"
            assert first_index == len(stream.tokens)
            stream.tokens += [next(tokens) for _ in range(num_tokens)]
            assert len(stream.tokens) <= stream.granted
            assert stream.tokens == stream.answer[: len(stream.tokens)]
        assert not list(tokens)
        self._hear_logprobs(output)
        for finish in output.finishes:
            stream = self.streams[finish.key]
            assert stream.reason is None, "two ends"
            stream.reason = finish.reason
            # A cancel may come too late.
            stream.is_cancelled &= finish.reason is FinishReason.CANCELLED
            assert finish.num_output_tokens == len(stream.tokens)
        if (wanted := output.masks_wanted) is not None:
            columns = (wanted.keys, wanted.rows, wanted.tickets, wanted.output_indices)
            for key, row, ticket, index in zip(*columns, strict=True):
                self.wanted[row] = Want(key, ticket, index, self.num_steps + key % (self.mask_delay + 1))
        if (events := output.cache_events) is not None:
            assert self.cached >= set(events.removed)
            self.cached -= set(events.removed)
            stored = [block_hash for chain in events.stored for block_hash in chain.hashes]
            assert len(set(stored)) == len(stored)
            assert self.cached.isdisjoint(stored)
            self.cached |= set(stored)

    def _hear_logprobs(self, output: StepOutput) -> None:
        """The simulated model finds each token the likeliest."""
        keys = [key for key, num_tokens in zip(output.keys, output.num_tokens, strict=True) for _ in range(num_tokens)]
        asking = [i for i, key in enumerate(keys) if self.streams[key].new.sampling.num_logprobs is not None]
        assert sorted(output.logprobs) == asking
        for i, entry in output.logprobs.items():
            assert entry.top_ids[0] == output.token_ids[i]
            assert len(entry.top_ids) == self.streams[keys[i]].new.sampling.num_logprobs
        for part in output.prompt_logprobs:
            stream = self.streams[part.key]
            assert part.first_position == stream.num_scored + 1
            stream.num_scored += len(part.entries)
            scored = stream.new.prompt_ids[part.first_position : stream.num_scored + 1]
            assert [entry.top_ids[0] for entry in part.entries] == scored
            assert part.last == (stream.num_scored == len(stream.new.prompt_ids) - 1)

    def _check_holds(self) -> None:
        """Reference counts are what the rows of the table hold."""
        scheduler = self.engine._scheduler
        held = Counter[int]()
        for row, request in enumerate(scheduler.table.requests):
            if request is not None:
                held.update(scheduler.table.blocks_of(row))
        for load in scheduler.host._loads:
            held.update(load.held + load.blocks)
        assert [held[block] for block in range(self.config.num_blocks)] == scheduler.pool.ref_counts

    def check_ends(self) -> None:
        for key, stream in self.streams.items():
            if stream.is_cancelled:
                assert stream.reason is FinishReason.CANCELLED
                continue
            assert stream.tokens == stream.answer, key
            sampling = stream.new.sampling
            scores_prompt = sampling.num_prompt_logprobs is not None and stream.cached_tokens is not None
            assert stream.num_scored == (len(stream.new.prompt_ids) - 1 if scores_prompt else 0)
            min_tokens = 0 if stream.new.has_grammar else sampling.min_tokens
            stops = len(stream.tokens) > min_tokens and stream.tokens[-1] in sampling.stop_token_ids
            assert stream.reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_prefill_tokens, load.num_used_blocks) == (0, 0, 0, 0)
        assert self.engine.step() is None


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 9))
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=1 + MAX_MODEL_LEN // BLOCK_SIZE + draw(st.sampled_from([0, 2, 5, 9, 24])),
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 5, 40])),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 100)),
        long_prefill_chunk=draw(st.sampled_from([0, 0, 7, 16, 40])),
        decode_steps=draw(st.sampled_from([1, 1, 2, 5])),
        async_depth=draw(st.integers(1, 4)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )


@st.composite
def swapping_configs(draw: st.DrawFn) -> EngineConfig:
    """The cache holds a prompt or two."""
    return replace(
        draw(configs()),
        num_blocks=1 + MAX_MODEL_LEN // BLOCK_SIZE + draw(st.sampled_from([0, 2])),
        num_host_blocks=draw(st.sampled_from([3, 12, 40])),
        enable_prefix_caching=True,
    )


@st.composite
def requests(draw: st.DrawFn, shortest_lead: int = 0) -> NewRequest:
    """Without its key."""
    lead = draw(st.sampled_from(LEADS))[: draw(st.integers(shortest_lead, 90))]
    tail = draw(st.lists(st.integers(0, 3), min_size=0 if lead else 1, max_size=10))
    min_tokens = draw(st.sampled_from([0, 0, 5]))
    stop_token_ids = draw(st.sampled_from([(2,), (2, 5), (), tuple(range(30, 43))]))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.sampled_from([0, 1, 2, 17, 33, 60, 90])),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        min_tokens_blocked_ids=draw(st.sampled_from([(), stop_token_ids])),
        num_logprobs=draw(st.sampled_from([None, None, 1, 3])),
        num_prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    choice_index = draw(st.integers(0, 1))
    has_grammar = draw(st.sampled_from([False, False, True]))
    answer = expected_tokens(
        MODEL,
        [*lead, *tail],
        sampling,
        choice_index=choice_index,
        max_model_len=MAX_MODEL_LEN,
        mask=grammar if has_grammar else None,
    )
    return NewRequest(
        key=0,
        prompt_ids=[*lead, *tail],
        output_ids=answer[: draw(st.sampled_from([0, 0, 0, 3, 20]))],
        sampling=sampling,
        choice_index=choice_index,
        has_grammar=has_grammar,
        namespace=draw(st.sampled_from([b"a" * 16, b"a" * 16, b"b" * 16])),
        credit=draw(st.sampled_from([MANY, MANY, 0, 1, 7])),
        tier=draw(st.integers(-1, 1)),
        virtual_time=draw(st.sampled_from([0.0, 1.5])),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
    )


@dataclass(frozen=True)
class Round:
    """What happens between some steps; requests are named by any number."""

    adds: list[NewRequest]
    num_steps: int
    cancels: list[int]
    credits: list[tuple[int, int]]


def rounds(shortest_lead: int = 0, most_steps: int = 12) -> st.SearchStrategy[list[Round]]:
    choice = st.integers(0, 100)
    one = st.builds(
        Round,
        adds=st.lists(requests(shortest_lead), min_size=1, max_size=6),
        num_steps=st.integers(0, most_steps),
        cancels=st.lists(choice, max_size=2),
        credits=st.lists(st.tuples(choice, st.integers(1, 9)), max_size=3),
    )
    return st.lists(one, min_size=2, max_size=7)


SCENARIOS = given(configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 1, 4]), rounds())
SWAPS = given(swapping_configs(), st.sampled_from([0, 3, MANY]), st.sampled_from([0, 4]), rounds(80, 60))
SOME = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
VERY_MANY = settings(SOME, max_examples=10_000)


def check_rounds(config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]) -> None:
    driver = Driver(config, late_polls, mask_delay)
    for each in rounds:
        for new in each.adds:
            driver.add(replace(new, key=len(driver.streams)))
        for _ in range(each.num_steps):
            driver.step()
        for choice in each.cancels:
            driver.cancel(choice % len(driver.streams))
        for choice, tokens in each.credits:
            driver.add_credit(choice % len(driver.streams), tokens)
    driver.run()
    for key in driver.streams:
        driver.add_credit(key, MANY)
    driver.run()
    driver.check_ends()
    event(f"grammars: {any(stream.new.has_grammar for stream in driver.streams.values())}")
    event(f"swapped in: {driver.engine.load().num_swapped_in > 0}")
    event(f"preempted: {driver.engine.load().num_preemptions > 0}")
    event(f"steps in flight: {driver.executor.max_in_flight}")


@SOME
@SCENARIOS
def test_every_stream_is_what_it_is_alone_and_nothing_leaks(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@SOME
@SWAPS
def test_nothing_changes_when_prefixes_leave_the_device_and_come_back(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@VERY_MANY
@SCENARIOS
def test_nothing_leaks_in_many_more_rounds(
    config: EngineConfig, late_polls: int, mask_delay: int, rounds: list[Round]
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds)


@settings(SOME, max_examples=60)
@given(st.integers(1, 4), st.lists(st.tuples(requests(), st.booleans()), min_size=2, max_size=8))
def test_one_after_another_hits_exactly_what_the_formula_says(depth: int, turns: list[tuple[NewRequest, bool]]) -> None:
    """Some are the next turn of the chat before them."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=200,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=30,
        async_depth=depth,
    )
    driver = Driver(config, late_polls=MANY)
    with_kv: list[list[int]] = []
    chat: list[int] = []
    for key, (new, is_next_turn) in enumerate(turns):
        prompt_ids = [*chat, *new.prompt_ids[-3:]] if is_next_turn else new.prompt_ids
        if len(prompt_ids) >= MAX_MODEL_LEN:
            continue
        driver.add(replace(new, key=key, prompt_ids=prompt_ids, output_ids=[], namespace=b"a" * 16, credit=MANY))
        driver.run()
        stream = driver.streams[key]
        common = max((shared(prompt_ids, ids) for ids in with_kv), default=0)
        is_scored = new.sampling.num_prompt_logprobs is not None
        assert stream.cached_tokens == (0 if is_scored else expected_cached_tokens(common, len(prompt_ids), BLOCK_SIZE))
        # The last token is sampled, never computed.
        chat = prompt_ids + stream.tokens
        with_kv.append(chat[: -1 if stream.tokens else None])
    driver.check_ends()


def shared(ours: list[int], theirs: list[int]) -> int:
    shorter = min(len(ours), len(theirs))
    differing = np.flatnonzero(np.array(ours[:shorter]) != np.array(theirs[:shorter]))
    return int(differing[0]) if differing.size else shorter
