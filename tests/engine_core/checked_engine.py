"""An engine that is driven and checked at every step: what it plans against the executor's contract, what it says
against what each stream should be, what it holds against what its rows hold.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import DrawPlan, Int32Array, StepPlan, StepResult, Swapper
from headwater.engine_core.executors.simulated import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated_model import SimulatedModel, UInt64Array, expected_tokens
from headwater.engine_core.kv.block_source import BlockSource
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.scheduling.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.grammar_drafts import GrammarDrafts
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable
from headwater.engine_core.scheduling.speculator import Speculator
from headwater.engine_core.step_output import StepOutput
from tests.engine_core.fixed_speculator import FixedSpeculator, Undrafted

BLOCK_SIZE = 16
MAX_MODEL_LEN = 128
MODEL = SimulatedModel(vocab_size=40, first_token_id=3, eos_token_id=2, eos_probability=0.02)
NUM_WORDS = 2


def grammar(answer: list[int]) -> Int32Array:
    """A mask that depends on the tokens before it; now and then the end of sequence is in it."""
    ids = np.arange(MODEL.vocab_size)
    allowed = (ids * 7 + len(answer) * 3 + sum(answer[-2:])) % 5 != 0
    allowed[2] = len(answer) % 9 == 4
    return np.packbits(np.resize(allowed, 32 * NUM_WORDS), bitorder="little").view(np.int32)


class CheckedExecutor:
    """The simulated executor behind a check of every plan against the contract."""

    def __init__(self, config: EngineConfig, late_polls: int) -> None:
        self.max_in_flight = self.num_steps = 0
        self._config = config
        self._executor = SimulatedExecutor(config, MODEL, SimulatedTiming(late_polls=late_polls), verify_every=1)
        self._blocks: dict[int, dict[int, int]] = {}
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._num_prompt: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._uncertain: dict[int, int] = {}
        """Drafts in flight, by row."""
        self._own_drafts: deque[dict[int, int]] = deque()
        """By row, of each step in flight: the most that the executor may have drafted."""
        self.num_tokens_of_drafts = Counter[int]()
        """How often a row with drafts gained so many tokens."""
        self._draws: dict[int, list[int]] = {}
        self._sampled: deque[list[int]] = deque()
        """Rows of each step in flight."""
        # Of each step in flight: the row that may read a block, for all blocks.
        self._readers: deque[dict[int, set[int]]] = deque()
        # By row: blocks that plans said it writes.
        self._writable: dict[int, set[int]] = {}
        self._copied: dict[int, int] = {}
        """By row: the block that began as a copy in this plan."""

    @property
    def kv_blocks(self) -> UInt64Array:
        """[num_blocks, block_size], for sources that read and write it."""
        return self._executor._kv.reshape(-1, BLOCK_SIZE)

    @property
    def swapper(self) -> Swapper | None:
        return self._executor.swapper

    @property
    def copies_blocks(self) -> bool:
        return self._executor.copies_blocks

    @property
    def can_draft(self) -> bool:
        return self._executor.can_draft

    @property
    def prefill_seconds(self) -> float:
        return self._executor.prefill_seconds

    def submit(self, plan: StepPlan) -> int:
        self.num_steps += 1
        self._take_rows(plan)
        self._take_blocks(plan)
        rows = plan.rows.tolist()
        assert rows, "an empty step"
        assert len(set(rows)) == len(rows)
        assert plan.num_tokens <= self._config.max_num_batched_tokens
        if plan.num_drafts is None:
            assert plan.draft_ids is None
        else:
            assert plan.num_drafts.any()
            if plan.draft_ids is not None:
                assert plan.num_drafts.sum() == plan.draft_ids.size
                assert ((plan.draft_ids >= 0) & (plan.draft_ids < MODEL.vocab_size)).all(), "drafts are tokens"
        readers: dict[int, set[int]] = {}
        writers: dict[int, int] = {}
        own_drafts: dict[int, int] = {}
        for i, row in enumerate(rows):
            start, end = self._plan_row(plan, i, row, own_drafts)
            for idx in range(-(-end // BLOCK_SIZE)):
                block = self._blocks[row][idx]
                readers.setdefault(block, set()).add(row)
                if (idx + 1) * BLOCK_SIZE > start:
                    assert writers.setdefault(block, row) == row, "two rows write a block"
                    assert block in self._writable[row], "written, and not said"
                    assert all(step.get(block, set()) <= {row} for step in self._readers), "written while listed"
        self._own_drafts.append(own_drafts)
        self._readers.append(readers)
        self._sampled.append(plan.rows[plan.samples].tolist())
        self.max_in_flight = max(self.max_in_flight, len(self._readers))
        assert len(self._readers) <= self._config.async_depth
        self._check_room()
        handle = self._executor.submit(plan)
        for row in own_drafts:
            # It computes at once, so it knows already.
            self._known[row] = int(self._executor._num_known[row])
            self._computed[row] = self._known[row] - 1
        return handle

    def _take_blocks(self, plan: StepPlan) -> None:
        for row, idx, block in zip(plan.block_rows, plan.block_indices, plan.block_ids, strict=True):
            assert block != 0
            is_computed = (int(idx) * BLOCK_SIZE) < self._computed.get(int(row), 0)
            assert not is_computed or self._blocks[int(row)].get(int(idx)) == block, "what is computed stays"
            self._blocks[int(row)][int(idx)] = int(block)
        self._copied = {}
        for source, target in plan.copied_blocks.tolist():
            [place] = np.flatnonzero(plan.block_ids == target).tolist()
            self._copied[int(plan.block_rows[place])] = int(plan.block_indices[place])
            assert source not in plan.block_ids, "copied from what the plan gives away"
            assert all(writer != source for writer in plan.copied_blocks[:, 1].tolist())
        written = set(plan.written_blocks(BLOCK_SIZE).tolist())
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self._writable.setdefault(row, set()).update({block} & written)

    def _plan_row(self, plan: StepPlan, i: int, row: int, own_drafts: dict[int, int]) -> tuple[int, int]:
        """Checks a row of a plan. Returns the first position that it computes, and the one behind the last."""
        start, end, output_idx = int(plan.starts[i]), int(plan.starts[i] + plan.counts[i]), int(plan.output_indices[i])
        num_drafts = 0 if plan.num_drafts is None else int(plan.num_drafts[i])
        assert not (plan.samples[i] and plan.holds[i])
        assert row not in self._uncertain, "planned before it is known how far it came"
        follows = plan.follows is not None and bool(plan.follows[i])
        assert follows == any(row in step for step in self._own_drafts), "goes on behind what is not known"
        if num_drafts:
            assert plan.samples[i] or plan.holds[i]
            assert len(self._blocks[row]) * BLOCK_SIZE >= end, "drafts have their blocks"
            assert self._num_prompt[row] + output_idx + num_drafts < MAX_MODEL_LEN
        if follows:
            behind = start + 1 - self._known[row]
            assert behind >= 0, "planned as far as it may have come"
            start, end, output_idx = start - behind, end - behind, output_idx - behind
        self._advance_row(row, start, end - num_drafts, samples=bool(plan.samples[i]), output_idx=output_idx)
        if num_drafts:
            assert end - num_drafts == start + 1, "drafts are of rows that decode"
            if plan.draft_ids is None:
                assert plan.samples[i], "what the executor drafts is drawn at once"
                own_drafts[row] = num_drafts
            else:
                self._uncertain[row] = num_drafts
        if plan.row_steps is not None:
            assert (end, plan.samples[i]) == (start + 1, True), "several steps are of rows that decode"
            for i_step in range(1, int(plan.row_steps[i])):
                self._advance_row(row, end, end + 1, samples=True, output_idx=output_idx + i_step)
                end += 1
        if plan.holds[i]:
            assert end - num_drafts == self._known[row]
            self._held[row] = end - num_drafts
        return start, end

    def draw(self, plan: DrawPlan) -> int:
        drafts = plan.num_drafts if plan.num_drafts is not None else np.zeros_like(plan.rows)
        assert len(plan.rows) + drafts.sum() <= self._config.max_positions
        for row, position, output_idx, num_drafts in zip(
            plan.rows.tolist(), plan.positions.tolist(), plan.output_indices.tolist(), drafts.tolist(), strict=True
        ):
            assert self._held.pop(row) == position == self._known[row]
            assert output_idx == position - self._num_prompt[row]
            assert num_drafts == self._uncertain.get(row, 0)
            self._known[row] += 1
        self._draws[plan.step] = plan.rows.tolist()
        self._check_room()
        return self._executor.draw(plan)

    def _check_room(self) -> None:
        """Results and staged words have a place for each plan in flight, and no more."""
        assert len(self._readers) + len(self._draws) <= 2 * self._config.async_depth + 1

    def retire(self, handle: int) -> StepResult:
        if handle in self._draws:
            rows = self._draws.pop(handle)
        else:
            self._readers.popleft()
            rows, own_drafts = self._sampled.popleft(), self._own_drafts.popleft()
            self._check_own_drafts(rows, own_drafts, self._executor._in_flight[0].result)
        result = self._executor.retire(handle)
        assert result.token_ids.shape[0] == len(result.num_tokens) == len(rows)
        for row, num_tokens in zip(rows, result.num_tokens.tolist(), strict=True):
            if (num_drafts := self._uncertain.pop(row, None)) is not None:
                assert 1 <= num_tokens <= num_drafts + 1
                self.num_tokens_of_drafts[num_tokens] += 1
                # The first was counted when it was planned.
                self._known[row] += num_tokens - 1
                self._computed[row] = self._known[row] - 1
        return result

    def _check_own_drafts(self, rows: list[int], most: dict[int, int], result: StepResult) -> None:
        assert (result.num_drafts is not None) == bool(most)
        if result.num_drafts is not None:
            for row, num_drafts, num_tokens in zip(
                rows, result.num_drafts.tolist(), result.num_tokens.tolist(), strict=True
            ):
                assert 1 <= num_tokens <= num_drafts + 1 <= most.get(row, 0) + 1
                self.num_tokens_of_drafts[num_tokens] += num_drafts > 0

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
            if self._held.pop(row, None) is not None:
                # What it held is never drawn.
                self._uncertain.pop(row, None)
            assert row not in self._uncertain
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
            assert start % BLOCK_SIZE == 0 or self._copied.get(row) == start // BLOCK_SIZE, "begun within a block"
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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0


class HalfRightSpeculator(FixedSpeculator):
    """Knows the answers, and guesses by lot: so many tokens, of which each may be wrong. Serves some requests only."""

    def __init__(self, seed: int, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.streams: dict[int, Stream] = {}
        self._rng = np.random.default_rng(seed)

    def serves(self, request: RequestState) -> bool:
        return request.key % 3 != 0

    def draft(self, table: RequestTable, rows: Rows, most: Int32Array, total: int) -> tuple[Int32Array, Int32Array]:
        num_drafts, draft_ids = np.zeros(len(rows), np.int32), np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            assert most[i] >= 0
            if not most[i]:
                continue
            request = table.requests[row]
            assert request is not None
            assert self.serves(request), "guesses are wanted for a row that it does not serve"
            known = table.known_ids(row).tolist()
            assert len(known) == table.num_computed[row] + 1, "something of the row is in flight"
            stream = self.streams[request.key]
            answer = stream.answer[len(known) - request.num_prompt_tokens :][: self._rng.integers(0, most[i] + 1)]
            guesses = [token if self._rng.random() < 0.8 else int(self._rng.integers(3, 40)) for token in answer]
            num_drafts[i] = len(guesses)
            draft_ids[i, : len(guesses)] = guesses
        return num_drafts, draft_ids


@dataclass
class Want:
    """The next mask of a row, and the step at which it is there."""

    key: int
    ticket: int
    index: int
    due: int
    draft_ids: list[int]
    """Behind which masks are wanted too."""


Sources = Callable[[UInt64Array], Sequence[BlockSource]]
"""Block sources beside a KV cache [num_blocks, block_size]."""


@dataclass
class Driver:
    """Talks to an engine and compares all it says."""

    config: EngineConfig
    late_polls: int
    mask_delay: int = 0
    """Steps that a mask takes, at most."""
    streams: dict[int, Stream] = field(default_factory=dict)
    cached: set[bytes] = field(default_factory=set)
    speculator: HalfRightSpeculator | AdaptiveSpeculator | Undrafted | None = None
    foretold: Callable[[Stream], list[int]] | None = None
    """What is said to be forced behind a stream's tokens, with their mask; needs a speculator."""
    sources: Sources | None = None
    """With them a step takes a second: some loads are given up."""

    def __post_init__(self) -> None:
        if self.speculator is not None:
            self.config = replace(self.config, max_draft_tokens=self.speculator.max_drafts)
        if isinstance(self.speculator, HalfRightSpeculator):
            self.speculator.streams = self.streams
        if isinstance(self.speculator, FixedSpeculator):
            self.speculator.beside(self.config)
        self.executor = CheckedExecutor(self.config, self.late_polls)
        self.num_steps = 0
        num_positions = self.config.max_draft_tokens + 1
        self.masks = np.zeros((num_positions, self.config.num_rows, NUM_WORDS), np.int32)
        self.engine = Engine(
            self.config,
            self.executor,
            clock=time.monotonic if self.sources is None else lambda: float(self.num_steps),
            masks=self.masks,
            speculator=self._beside_grammars(),
            sources=() if self.sources is None else self.sources(self.executor.kv_blocks),
        )
        self.wanted: dict[int, Want] = {}
        """By row."""

    def _beside_grammars(self) -> Speculator | None:
        if self.speculator is None or self.foretold is None:
            return self.speculator
        return GrammarDrafts(self.speculator, num_rows=self.config.num_rows, vocab_size=MODEL.vocab_size)

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

    def stall(self, key: int) -> None:
        self.engine.stall(key)

    def fill_masks(self, *, at_once: bool = False) -> None:
        """As the server would: also for requests that have ended, and again what is there."""
        filled = []
        for row, want in self.wanted.items():
            tokens = self.streams[want.key].tokens
            if len(tokens) >= want.index and (at_once or want.due <= self.num_steps):
                drafts = want.draft_ids if len(tokens) == want.index else []
                for i in range(len(drafts) + 1):
                    self.masks[i, row] = grammar([*tokens, *drafts[:i]])
                forced = [] if self.foretold is None else self.foretold(self.streams[want.key])
                filled.append((row, want.ticket, len(tokens), len(drafts) + 1, forced))
                want.index, want.draft_ids = len(tokens) + 1, []
                want.due = self.num_steps + (want.key + want.index) % (self.mask_delay + 1)
        if filled:
            self.engine.masks_filled(*map(list, zip(*filled, strict=True)))

    @property
    def awaits_masks(self) -> bool:
        return self.engine._scheduler.held.await_masks

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
            if finish.work is not None:
                stream.num_draft_tokens = finish.work.num_draft_tokens
                stream.num_accepted_tokens = finish.work.num_accepted_tokens
                stream.num_steps = finish.work.num_steps
        if (wanted := output.masks_wanted) is not None:
            columns = (wanted.keys, wanted.rows, wanted.tickets, wanted.output_indices, wanted.draft_ids)
            for key, row, ticket, index, draft_ids in zip(*columns, strict=True):
                self.wanted[row] = Want(key, ticket, index, self.num_steps + key % (self.mask_delay + 1), draft_ids)
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
        held.update(scheduler.forks.held_blocks)
        for load in scheduler.loads._open.values():
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
