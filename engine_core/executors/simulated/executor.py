"""An executor without a model: deterministic tokens that prove which KV they were computed from,
and a timing model.

A position's KV entry is the entry before it, read through the row's block table, plus a hash of
token and position. One entry thus stands for the whole sequence that led to it, and the token
sampled from it is wrong if any block was lost, shared wrongly or overwritten. Everything is
computed by `submit`; `retire` waits as long as a model would take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...config import EngineConfig
from ...executor import DrawPlan, Int32Array, StepPlan, StepResult, Swapper
from ...ragged import places
from ...request import TokenLogprobs
from ...sampling.verification import gained, positions_of
from ..model.shared_kv import SharedCopies, SharedMemory
from ..table.known_positions import repeated, with_device_drafts
from .adapters import SimulatedAdapters
from .cache import ENTRY_BYTES, SimulatedCache
from .hashes import POSITION_SALT, UInt64Array, hashes, mix
from .memory import SimulatedMemory
from .model import SimulatedModel
from .swapper import SimulatedSwapper
from .table import SimulatedTable

DRAFT_SALT = np.uint64(0x9FB21C651E98DF25)
NUM_SIMULATED_VALUES = 64
"""Number of values of an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiming:
    """Seconds that a step takes, and how late its result is noticed."""

    step_seconds: float = 0.0
    seconds_per_request: float = 0.0
    seconds_per_prefill_token: float = 0.0
    seconds_per_read_token: float = 0.0
    """Seconds for each token whose keys and values a decode row reads."""
    late_polls: int = 0
    """`is_ready` says no up to this many times, a different number for each step."""

    def seconds(self, plan: StepPlan) -> float:
        num_prefill_tokens = int(plan.counts[plan.counts > 1].sum())
        requests = self.seconds_per_request * plan.rows.size
        tokens = self.seconds_per_prefill_token * num_prefill_tokens
        reads = self.seconds_per_read_token * int(plan.starts[plan.counts == 1].sum())
        return self.step_seconds + requests + tokens + reads

    def polls(self, step: int) -> int:
        return step * 2654435761 % 4294967296 % (self.late_polls + 1)


INSTANT = SimulatedTiming()


@dataclass(slots=True)
class _InFlight:
    handle: int
    result: StepResult
    ready_at: float
    polls_left: int


MOST_LATE_POLLS = 3
"""Largest number of polls after which a block is loaded."""


class SimulatedExecutor:
    """Executor that keeps a request table and a KV cache of one 64-bit entry a token."""

    computes_at_once = False
    copies_blocks = True

    def __init__(
        self,
        config: EngineConfig,
        model: SimulatedModel,
        timing: SimulatedTiming = INSTANT,
        *,
        draft_acceptance: float = 0.0,
        verify_every: int = 64,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`draft_acceptance`: share of correct tokens of a simulated draft model; 0: drafts repeat
        what followed the last token before. Every `verify_every` steps one row's whole KV is read
        and compared with its tokens."""
        self._model = model
        self._timing = timing
        self._verify_every = verify_every
        self._draft_acceptance = draft_acceptance
        self._clock = clock
        self._sleep = sleep
        self._in_flight: deque[_InFlight] = deque()
        self._busy_until = 0.0
        memory = None
        if config.shares_kv_cache:
            memory = SharedMemory(config.num_blocks, config.block_size * ENTRY_BYTES)
        self.host_adapters = SimulatedAdapters(config.num_adapter_ranks)
        self._table = SimulatedTable(config, model, self.host_adapters)
        self._cache = SimulatedCache(config, self._table, model, memory)
        self._held: dict[int, UInt64Array] = {}
        """KV entries of each position by row, for a draw."""
        self.prefill_seconds = timing.seconds_per_prefill_token
        self.can_draft = config.max_draft_tokens > 0
        self.swapper = self._swapper(config, memory)

    @property
    def releasable(self) -> SimulatedMemory:
        return self._cache.memory

    def _swapper(self, config: EngineConfig, memory: SharedMemory | None) -> Swapper | None:
        if not config.num_swap_slots:
            return None
        return SimulatedSwapper(
            self._cache.blocks,
            config.num_swap_slots,
            late_polls=min(self._timing.late_polls, MOST_LATE_POLLS),
            direct_copies=None if memory is None else SharedCopies(memory),
        )

    def submit(self, plan: StepPlan) -> int:
        result = self._compute(plan)
        self._in_flight.append(
            _InFlight(plan.step, result, self._busy_until, self._timing.polls(plan.step))
        )
        return plan.step

    def _compute(self, plan: StepPlan) -> StepResult:
        assert self.releasable.is_here, "a step of an engine that sleeps"
        for row in plan.released:
            self._held.pop(row, None)
        self.host_adapters.precede(plan)
        self._table.apply(plan)
        self._cache.apply(plan)
        drafts_itself = plan.num_drafts is not None and plan.draft_ids is None
        plan = with_device_drafts(plan, self._table.num_known, self._draft)
        self._write_drafts(plan)
        self._cache.write(plan)
        if plan.step % self._verify_every == 0:
            self._cache.verify(plan, plan.step // self._verify_every % plan.rows.size)
        self._busy_until = max(self._busy_until, self._clock()) + self._timing.seconds(plan)
        result = self._sample(plan)
        if drafts_itself and plan.num_drafts is not None:
            result = replace(result, num_drafts=plan.num_drafts[plan.samples])
        return result

    def draw(self, plan: DrawPlan) -> int:
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        entries = np.concatenate([self._held.pop(row) for row in plan.rows.tolist()])
        rows = np.repeat(plan.rows, num_positions)
        place = places(num_positions)
        at = np.repeat(plan.positions, num_positions) + place
        outputs = np.repeat(plan.output_indices, num_positions) + place
        tokens = self._model.masked_tokens(
            entries, self._table.noise(rows), outputs, plan.masks[place, rows]
        )
        self._edit(tokens, rows, at, entries, plan.masks[place, rows])
        result = self._verified(plan.rows, num_positions, rows, at, tokens)
        self._in_flight.append(
            _InFlight(plan.step, result, self._busy_until, self._timing.polls(plan.step))
        )
        return plan.step

    def retire(self, handle: int) -> StepResult:
        step = self._in_flight.popleft()
        assert step.handle == handle, "plans retire in order"
        if (remaining := step.ready_at - self._clock()) > 0:
            self._sleep(remaining)
        return step.result

    def is_ready(self, handle: int) -> bool:
        step = self._in_flight[0]
        assert step.handle == handle, "plans retire in order"
        step.polls_left -= 1
        return step.polls_left < 0 and step.ready_at <= self._clock()

    def warm_up(self) -> float:
        return 0.0

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._in_flight.clear()

    def _draft(self, row: int, num_known: int, most: int) -> Int32Array:
        if self._draft_acceptance:
            return self._pretended(row, num_known, most)
        return repeated(self._table.token_ids[row, :num_known], most)

    def _pretended(self, row: int, num_known: int, most: int) -> Int32Array:
        """Drafts of a draft model that finds the right token with the probability
        `_draft_acceptance`."""
        rows = np.array([row], np.int32)
        at = np.array([num_known - 1], np.int32)
        most_seen = max(map(self._model.num_seen, range(len(self._model.windows))))
        entries = self._cache.last_entries(rows, at - 1, min(most_seen, int(at[0])))[0]
        before = entries[-1:].sum(dtype=np.uint64)
        entries = np.append(entries, before + hashes(self._table.token_ids[rows, at], at))
        noise = self._table.noise(rows)
        drafts = np.empty(most, np.int32)
        for i in range(most):
            output = at + np.int32(i + 1) - self._table.num_prompt[rows]
            entry = self._model.seen(entries)
            token = self._model.tokens(entry, noise, output, self._table.eos_from[rows])
            is_right = float(mix(entry + DRAFT_SALT)[0]) < self._draft_acceptance * 2**64
            drafts[i] = token[0] if is_right else (token[0] + 1) % self._model.vocab_size
            added = hashes(drafts[i : i + 1], at + np.int32(i + 1))
            entries = np.append(entries, entries[-1] + added)
        return drafts

    def _write_drafts(self, plan: StepPlan) -> None:
        if plan.num_drafts is not None and plan.draft_ids is not None:
            first = np.repeat(plan.starts + plan.counts - plan.num_drafts, plan.num_drafts)
            self._table.token_ids[
                np.repeat(plan.rows, plan.num_drafts), first + places(plan.num_drafts)
            ] = plan.draft_ids

    def _sample(self, plan: StepPlan) -> StepResult:
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        first = plan.starts + plan.counts - num_positions
        for i in np.flatnonzero(plan.holds).tolist():
            positions = np.arange(first[i], first[i] + num_positions[i], dtype=np.int32)
            rows = np.full(positions.size, plan.rows[i])
            self._held[int(plan.rows[i])] = self._cache.seen(rows, positions)
        sampled = plan.rows[plan.samples]
        num_positions = num_positions[plan.samples]
        rows = np.repeat(sampled, num_positions)
        place = places(num_positions)
        at = np.repeat(first[plan.samples], num_positions) + place
        entries = self._cache.seen(rows, at)
        outputs = np.repeat(plan.output_indices[plan.samples], num_positions) + place
        tokens = self._model.tokens(
            entries,
            self._table.noise(rows),
            outputs,
            self._table.eos_from[rows],
            self._table.num_kept[rows],
        )
        self._edit(tokens, rows, at + 1, entries)
        result = self._verified(sampled, num_positions, rows, at + 1, tokens)
        if not plan.looks_at_all:
            return result
        return replace(
            result, prompt_logprobs=self._prompt_logprobs(plan), embeddings=self._embeddings(plan)
        )

    def _edit(
        self,
        tokens: Int32Array,
        rows: Int32Array,
        at: Int32Array,
        entries: UInt64Array,
        masks: Int32Array | None = None,
    ) -> None:
        """Edits, in place, tokens that belong at positions `at` of their rows."""
        if not self._table.edits:
            return
        for i, row in enumerate(rows.tolist()):
            if (edits := self._table.edits.get(row)) is not None:
                candidates = self._model.candidates(edits, None if masks is None else masks[i])
                outputs = self._table.token_ids[row, self._table.num_prompt[row] : at[i]].astype(
                    np.int64
                )
                noise = self._table.noise(rows[i : i + 1])
                tokens[i] = edits.token(
                    int(tokens[i]), candidates, entries[i : i + 1], noise, outputs
                )

    def _verified(
        self,
        rows: Int32Array,
        num_positions: Int32Array,
        rows_of: Int32Array,
        at: Int32Array,
        tokens: Int32Array,
    ) -> StepResult:
        """Verifies drafts: writes to each of `rows` its sampled tokens up to the first that differs
        from the draft in its place. `at`: position of each token in row `rows_of`, row by row."""
        columns, num_tokens = gained(tokens, self._table.token_ids[rows_of, at], num_positions)
        counts = places(num_positions) < np.repeat(num_tokens, num_positions)
        rows_of = rows_of[counts]
        at = at[counts]
        self._table.token_ids[rows_of, at] = tokens[counts]
        # Positions of a row ascend, and of equal indices the last one is written.
        self._table.num_known[rows_of] = at + 1
        return StepResult(
            token_ids=columns,
            num_tokens=num_tokens,
            logprobs=self._logprobs(rows, columns, num_tokens),
        )

    def _logprobs(
        self, rows: Int32Array, tokens: Int32Array, num_tokens: Int32Array
    ) -> dict[int, TokenLogprobs]:
        if not self._table.num_logprobs:
            return {}
        return {
            j * tokens.shape[1] + i: self._model.logprobs(
                int(tokens[j, i]), self._table.num_logprobs[row]
            )
            for j, row in enumerate(rows.tolist())
            if row in self._table.num_logprobs
            for i in range(num_tokens[j])
        }

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        scored: dict[int, list[TokenLogprobs]] = {}
        for row in plan.prompt_logprob_rows:
            i = int(np.flatnonzero(plan.rows == row)[0])
            start = int(plan.starts[i])
            end = int(plan.starts[i] + plan.counts[i])
            targets = self._table.token_ids[
                row, start + 1 : min(end + 1, int(self._table.num_prompt[row]))
            ].tolist()
            scored[row] = [
                self._model.logprobs(token, self._table.num_prompt_logprobs[row])
                for token in targets
            ]
        return scored

    def _embeddings(self, plan: StepPlan) -> dict[int, bytes]:
        """Vectors that depend on the prompt."""
        vectors = {}
        for row in plan.pooled_rows:
            i = int(np.flatnonzero(plan.rows == row)[0])
            if (end := int(plan.starts[i] + plan.counts[i])) == self._table.num_prompt[row]:
                entry = self._cache.seen(np.array([row]), np.array([end - 1]))
                draws = mix(
                    entry + np.arange(NUM_SIMULATED_VALUES, dtype=np.uint64) * POSITION_SALT
                )
                vectors[row] = (draws.astype(np.float64) / 2**63 - 1).astype(np.float32).tobytes()
        return vectors
