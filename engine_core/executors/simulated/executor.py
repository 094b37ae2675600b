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
from ...executor import AdmittedRow, DrawPlan, Int32Array, StepPlan, StepResult, Swapper
from ...ragged import places
from ...request import TokenLogprobs
from ...sampling.verification import gained, positions_of
from ..model.shared_kv import SharedCopies, SharedMemory
from ..table.known_positions import repeated, with_device_drafts
from .edits import SimulatedEdits
from .hashes import POSITION_SALT, UInt64Array, hashes, mix
from .model import SimulatedModel, eos_from_of, noise_of
from .swapper import SimulatedSwapper

DRAFT_SALT = np.uint64(0x9FB21C651E98DF25)
NUM_SIMULATED_VALUES = 64
"""Number of values of an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiming:
    """How long a step takes, and how late its result is noticed."""

    step_seconds: float = 0.0
    seconds_per_request: float = 0.0
    seconds_per_prefill_token: float = 0.0
    late_polls: int = 0
    """`is_ready` says no up to this many times, a different number for each step."""

    def seconds(self, plan: StepPlan) -> float:
        num_prefill_tokens = int(plan.counts[plan.counts > 1].sum())
        requests = self.seconds_per_request * plan.rows.size
        tokens = self.seconds_per_prefill_token * num_prefill_tokens
        return self.step_seconds + requests + tokens

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
"""Largest number of polls that a block comes late by: no call waits for it by name."""


class SimulatedExecutor:
    """Keeps a request table and a KV cache of one 64-bit entry a token."""

    computes_at_once = False

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
        """`draft_acceptance`: share of the tokens of a pretended draft model that are right; 0:
        what is drafted here is what followed the last token before. Every `verify_every` steps one
        row's whole KV is read and compared with its tokens."""
        num_rows = config.num_rows
        self._block_size = config.block_size
        self._model = model
        self._timing = timing
        self._verify_every = verify_every
        self._draft_acceptance = draft_acceptance
        self._clock = clock
        self._sleep = sleep
        self._in_flight: deque[_InFlight] = deque()
        self._busy_until = 0.0
        memory = SharedMemory()
        num_entries = config.num_blocks * config.block_size
        self._kv: UInt64Array = np.zeros(num_entries, np.uint64)
        if config.shares_kv_cache:
            self._kv = memory.bytes(self._kv.nbytes).view(np.uint64)
        self.prefill_seconds = timing.seconds_per_prefill_token
        self.swapper: Swapper | None = None
        if config.num_swap_slots:
            blocks = self._kv.reshape(-1, config.block_size)
            late_polls = min(timing.late_polls, MOST_LATE_POLLS)
            copies = (
                SharedCopies(memory, [1], config.num_blocks) if config.shares_kv_cache else None
            )
            self.swapper = SimulatedSwapper(
                blocks, config.num_swap_slots, late_polls=late_polls, direct_copies=copies
            )
        self._block_table: Int32Array = np.zeros(
            (num_rows, -(-config.max_model_len // config.block_size)), np.int32
        )
        self._token_ids: Int32Array = np.zeros((num_rows, config.max_model_len), np.int32)
        self._noise: UInt64Array = np.zeros(num_rows, np.uint64)
        self._eos_from: Int32Array = np.zeros(num_rows, np.int32)
        self._num_kept: UInt64Array = np.zeros(num_rows, np.uint64)
        self._edits: dict[int, SimulatedEdits] = {}
        """Edits of the rows that have any."""
        self._num_prompt: Int32Array = np.zeros(num_rows, np.int32)
        self._num_known: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of each row, sampled ones included."""
        self.copies_blocks = True
        self.can_draft = config.max_draft_tokens > 0
        self._held: dict[int, UInt64Array] = {}
        """KV entries of each position by row, for a draw."""
        self._num_logprobs: dict[int, int] = {}
        self._num_prompt_logprobs: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> int:
        result = self._compute(plan)
        self._in_flight.append(
            _InFlight(plan.step, result, self._busy_until, self._timing.polls(plan.step))
        )
        return plan.step

    def _compute(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            self._held.pop(row, None)
            self._edits.pop(row, None)
            self._num_logprobs.pop(row, None)
            self._num_prompt_logprobs.pop(row, None)
        for admitted in plan.admitted:
            self._admit(admitted)
        self._block_table[plan.block_rows, plan.block_indices] = plan.block_ids
        blocks = self._kv.reshape(-1, self._block_size)
        blocks[plan.copied_blocks[:, 1]] = blocks[plan.copied_blocks[:, 0]]
        drafts_itself = plan.num_drafts is not None and plan.draft_ids is None
        plan = with_device_drafts(plan, self._num_known, self._draft)
        self._write_drafts(plan)
        self._write_kv(plan)
        if plan.step % self._verify_every == 0:
            self._verify(plan)
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
            entries, self._noise[rows], outputs, plan.masks[place, rows]
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

    def _admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        sampling = admitted.sampling
        self._token_ids[row, : len(admitted.token_ids)] = admitted.token_ids
        self._num_prompt[row] = admitted.num_prompt_tokens
        self._noise[row] = noise_of(sampling, admitted.choice_index)
        self._eos_from[row] = eos_from_of(sampling, self._model)
        self._num_kept[row] = self._model.num_kept(sampling)
        prompt_ids = np.array(admitted.token_ids[: admitted.num_prompt_tokens], np.int32)
        edits = SimulatedEdits.of(sampling, prompt_ids, self._model.first_token_id)
        if edits is not None:
            self._edits[row] = edits
        if sampling.num_logprobs is not None:
            self._num_logprobs[row] = sampling.num_logprobs
        if sampling.num_prompt_logprobs is not None:
            self._num_prompt_logprobs[row] = sampling.num_prompt_logprobs

    def _draft(self, row: int, num_known: int, most: int) -> Int32Array:
        if self._draft_acceptance:
            return self._pretended(row, num_known, most)
        return repeated(self._token_ids[row, :num_known], most)

    def _pretended(self, row: int, num_known: int, most: int) -> Int32Array:
        """Drafts of a draft model that finds the right token with the probability
        `_draft_acceptance`."""
        rows = np.array([row], np.int32)
        at = np.array([num_known - 1], np.int32)
        before = self._kv[self._slots(rows, at - 1)] * (at > 0)
        entry = before + hashes(self._token_ids[rows, at], at)
        noise = self._noise[rows]
        drafts = np.empty(most, np.int32)
        for i in range(most):
            output = at + np.int32(i + 1) - self._num_prompt[rows]
            token = self._model.tokens(entry, noise, output, self._eos_from[rows])
            is_right = float(mix(entry + DRAFT_SALT)[0]) < self._draft_acceptance * 2**64
            drafts[i] = token[0] if is_right else (token[0] + 1) % self._model.vocab_size
            entry = entry + hashes(drafts[i : i + 1], at + np.int32(i + 1))
        return drafts

    def _write_drafts(self, plan: StepPlan) -> None:
        if plan.num_drafts is not None and plan.draft_ids is not None:
            first = np.repeat(plan.starts + plan.counts - plan.num_drafts, plan.num_drafts)
            self._token_ids[
                np.repeat(plan.rows, plan.num_drafts), first + places(plan.num_drafts)
            ] = plan.draft_ids

    def _write_kv(self, plan: StepPlan) -> None:
        """Rows of one token at once, then the others in the plan's order: a row that joins with
        this plan may read what another writes in it."""
        is_alone = plan.counts != 1
        if plan.admitted:
            is_alone |= np.isin(plan.rows, [admitted.row for admitted in plan.admitted])
        together = ~is_alone
        self._write_tokens(plan.rows[together], plan.starts[together])
        for i in np.flatnonzero(is_alone).tolist():
            self._write_chunk(int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i]))

    def _write_tokens(self, rows: Int32Array, positions: Int32Array) -> None:
        # Position −1 reads some entry, which the first position does not count.
        before = self._kv[self._slots(rows, positions - 1)] * (positions > 0)
        self._kv[self._slots(rows, positions)] = before + hashes(
            self._token_ids[rows, positions], positions
        )

    def _write_chunk(self, row: int, start: int, count: int) -> None:
        positions = np.arange(start, start + count, dtype=np.int32)
        before = self._kv[self._slots(row, positions[:1] - 1)] if start else np.zeros(1, np.uint64)
        added = hashes(self._token_ids[row, start : start + count], positions)
        self._kv[self._slots(row, positions)] = before + np.cumsum(added)

    def _slots(self, rows: Int32Array | int, positions: Int32Array) -> Int32Array:
        idx = positions // self._block_size
        slots: Int32Array = positions + (self._block_table[rows, idx] - idx) * self._block_size
        return slots

    def _sample(self, plan: StepPlan) -> StepResult:
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        first = plan.starts + plan.counts - num_positions
        for i in np.flatnonzero(plan.holds).tolist():
            positions = np.arange(first[i], first[i] + num_positions[i], dtype=np.int32)
            self._held[int(plan.rows[i])] = self._kv[self._slots(int(plan.rows[i]), positions)]
        sampled = plan.rows[plan.samples]
        num_positions = num_positions[plan.samples]
        rows = np.repeat(sampled, num_positions)
        place = places(num_positions)
        at = np.repeat(first[plan.samples], num_positions) + place
        entries = self._kv[self._slots(rows, at)]
        outputs = np.repeat(plan.output_indices[plan.samples], num_positions) + place
        tokens = self._model.tokens(
            entries, self._noise[rows], outputs, self._eos_from[rows], self._num_kept[rows]
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
        if not self._edits:
            return
        for i, row in enumerate(rows.tolist()):
            if (edits := self._edits.get(row)) is not None:
                candidates = self._model.candidates(edits, None if masks is None else masks[i])
                outputs = self._token_ids[row, self._num_prompt[row] : at[i]].astype(np.int64)
                noise = self._noise[row : row + 1]
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
        """Writes what each of `rows` gains: of its sampled tokens, which belong at positions `at`
        of `rows_of` and are given row by row, those up to the first that differs from the draft in
        its place."""
        columns, num_tokens = gained(tokens, self._token_ids[rows_of, at], num_positions)
        counts = places(num_positions) < np.repeat(num_tokens, num_positions)
        rows_of = rows_of[counts]
        at = at[counts]
        self._token_ids[rows_of, at] = tokens[counts]
        # Positions of a row ascend, and of equal indices the last one is written.
        self._num_known[rows_of] = at + 1
        return StepResult(
            token_ids=columns,
            num_tokens=num_tokens,
            logprobs=self._logprobs(rows, columns, num_tokens),
        )

    def _logprobs(
        self, rows: Int32Array, tokens: Int32Array, num_tokens: Int32Array
    ) -> dict[int, TokenLogprobs]:
        if not self._num_logprobs:
            return {}
        return {
            j * tokens.shape[1] + i: self._model.logprobs(
                int(tokens[j, i]), self._num_logprobs[row]
            )
            for j, row in enumerate(rows.tolist())
            if row in self._num_logprobs
            for i in range(num_tokens[j])
        }

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        scored: dict[int, list[TokenLogprobs]] = {}
        for row in plan.prompt_logprob_rows:
            i = int(np.flatnonzero(plan.rows == row)[0])
            start = int(plan.starts[i])
            end = int(plan.starts[i] + plan.counts[i])
            targets = self._token_ids[
                row, start + 1 : min(end + 1, int(self._num_prompt[row]))
            ].tolist()
            scored[row] = [
                self._model.logprobs(token, self._num_prompt_logprobs[row]) for token in targets
            ]
        return scored

    def _embeddings(self, plan: StepPlan) -> dict[int, bytes]:
        """Vectors that say which prompt they are of."""
        vectors = {}
        for row in plan.pooled_rows:
            i = int(np.flatnonzero(plan.rows == row)[0])
            if (end := int(plan.starts[i] + plan.counts[i])) == self._num_prompt[row]:
                entry = self._kv[self._slots(np.array([row]), np.array([end - 1]))]
                draws = mix(
                    entry + np.arange(NUM_SIMULATED_VALUES, dtype=np.uint64) * POSITION_SALT
                )
                vectors[row] = (draws.astype(np.float64) / 2**63 - 1).astype(np.float32).tobytes()
        return vectors

    def _verify(self, plan: StepPlan) -> None:
        """One row's every entry, as attention would read them."""
        i = plan.step // self._verify_every % plan.rows.size
        row = int(plan.rows[i])
        num_tokens = int(plan.starts[i] + plan.counts[i])
        positions = np.arange(num_tokens, dtype=np.int32)
        should_be = np.cumsum(hashes(self._token_ids[row, :num_tokens], positions))
        wrong = np.flatnonzero(self._kv[self._slots(row, positions)] != should_be)
        assert not wrong.size, (
            f"step {plan.step}, row {row}: KV of positions {wrong[:8].tolist()} is not its own"
        )
