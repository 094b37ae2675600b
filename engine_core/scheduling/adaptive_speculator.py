"""Drafts tokens where that brings more of them a second, and else lets plain steps run ahead of their results.

Guesses from here need results: a row's next plan waits for the last one's, which costs a gap. So either all rows wait
or none: rows that do not wait would be computed beside those that do in every second step only. An executor that
drafts by itself needs none, so where it serves all rows they run ahead, and only lengths come from here. While rows do
neither, guesses are made all the same and compared with what is sampled, so that acceptance is known before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwater.engine_core.drafting.acceptance import Acceptance
from headwater.engine_core.drafting.draft_lengths import Choice, choose, expected
from headwater.engine_core.drafting.drafter import Drafter
from headwater.engine_core.drafting.executor_drafts import ExecutorDrafts
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable
from headwater.kernels.cpu.guesses import WRONG, better_taker, comparer

WORTHWHILE = 1.05
"""Gain from which on rows wait for results."""
PACE_MEMORY = 0.75
"""Weight of the gain of the steps before. One step without a match does not tell that none will come: to begin anew
costs more than to wait once in vain."""
MOST_PACE = 2.0
"""Gains count as this much at most: however good drafts were, a few steps without any are enough to stop waiting."""
NO_DRAFTS = 0.95
"""What a step counts for which the executor is asked for no drafts: without them nothing is learned about them."""
ANY = -1


class AdaptiveSpeculator:
    """See `Speculator`."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: StepCosts,
        *,
        num_rows: int,
        max_drafts: int,
        vocab_size: int,
        executor_drafts: str = "",
    ) -> None:
        """`num_rows`: of the request table; `executor_drafts`: which of the drafters the executor has as well, if any,
        for rows that are drawn plainly."""
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._drafters, self._costs, self._vocab_size = tuple(drafters), costs, vocab_size
        self._acceptance = Acceptance(num_rows)
        self.num_bytes = sum(drafter.num_bytes for drafter in drafters)
        self._executor_drafts, self._by_executor = executor_drafts, ExecutorDrafts(num_rows)
        self._costs_ahead = replace(costs, gap=0.0)
        self._is_waiting, self._is_ahead, self._pace = False, False, 1.0
        self._may_run_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._is_seated: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that a request has: those that wait when rows wait."""
        self._most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        self._wanted: Int32Array = np.full(num_rows, ANY, np.int32)
        """The drafter that each row's request names."""
        self._guesses: Int32Array = np.zeros((num_rows, max_drafts), np.int32)
        self._num_guesses: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the row's last guess; 0 once it is known to be wrong, or behind us."""
        self._guessed_from: Int32Array = np.zeros(num_rows, np.int32)
        """Position of the first token that was guessed."""
        self._num_right: Int32Array = np.zeros(num_rows, np.int32)
        """Guessed tokens that were sampled so far."""
        self._match_lens: Int32Array = np.zeros(num_rows, np.int32)

    def seat(self, request: RequestState) -> None:
        row, asked = request.row, request.speculation
        names = [drafter.name for drafter in self._drafters]
        is_served = asked.is_on and asked.drafter in ("", *names)
        self._most[row] = min(asked.max_tokens or self.max_drafts, self.max_drafts) if is_served else 0
        self._wanted[row] = names.index(asked.drafter) if is_served and asked.drafter else ANY
        self._is_seated[row] = True
        is_plain = request.sampling.is_plain and not request.has_grammar
        self._may_run_ahead[row] = (
            is_served and is_plain and self._executor_drafts in names and asked.drafter in ("", self._executor_drafts)
        )
        self.needs_result[row] = self._is_waiting
        self.runs_ahead[row] = self._is_ahead and self._may_run_ahead[row]
        self._acceptance.reset(row)
        self._by_executor.reset(row)
        for drafter in self._drafters:
            drafter.seat(row, request.chain.namespace, request.num_prompt_tokens)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = self.runs_ahead[row] = self._is_seated[row] = False
        self._most[row] = 0
        # What was right so far is noted before the row is another request's.
        self._end_guesses(np.array([row]), is_wrong=np.zeros(1, np.bool_))
        for drafter in self._drafters:
            drafter.vacate(row, token_ids)
        self.num_bytes = sum(drafter.num_bytes for drafter in self._drafters)

    def settle_drafts(self, rows: Rows, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        self._by_executor.note(rows, most, num_drafts, num_accepted)

    def settle(self, table: RequestTable, rows: Rows, first: Int32Array) -> None:
        if self._is_ahead:
            return
        self._compare(table, rows, first)
        if self._is_waiting:
            return
        unguessed = rows[(self._num_guesses[rows] == 0) & (self._most[rows] > 0)]
        if unguessed.size:
            self._guess(table, unguessed, self._most[unguessed])
        rows = rows[self._num_guesses[rows] > 0]
        if rows.size:
            num_left = self._num_guesses[rows] - (table.num_known[rows] - self._guessed_from[rows])
            num_decoding = max(int(np.count_nonzero(table.compute_end)), rows.size)
            gain = self._choose(rows, num_left, num_decoding, num_decoding * self.max_drafts).gain
            if gain > WORTHWHILE:
                self._start(gain)

    def lengths(self, rows: Rows, most: Int32Array, total: int) -> Int32Array:
        most = np.minimum(most, self._most[rows])
        stands = self._by_executor.stands(rows, most, self.max_drafts)
        num_drafts, gain = choose(stands, self._costs_ahead, rows.size, total)
        self._note_pace(gain if num_drafts.any() else NO_DRAFTS)
        if self._pace < 1.0:
            self._stop()
        return num_drafts

    def draft(
        self, table: RequestTable, rows: Rows, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        num_drafts, gain = self._look_up(table, rows, most, total)
        if not num_drafts.any():
            seconds = float(self._costs.of(rows.size))
            gain = seconds / (seconds + self._costs.gap)
        self._note_pace(gain)
        if self._pace < 1.0 or not self._most[rows].any():
            self._stop()
        return num_drafts, self._guesses[rows]

    def _look_up(self, table: RequestTable, rows: Rows, most: Int32Array, total: int) -> Choice:
        """Guesses for each row, up to most[i], and chooses how many of them to verify."""
        most = np.minimum(most, self._most[rows])
        num_drafts, gain = np.zeros(rows.size, np.int32), 1.0
        drafted = np.flatnonzero(most > 0)
        if drafted.size:
            some = rows[drafted]
            self._guess(table, some, most[drafted])
            num_drafts[drafted], gain = self._choose(some, self._num_guesses[some], rows.size, total)
        return Choice(num_drafts, gain)

    def _note_pace(self, gain: float) -> None:
        self._pace = PACE_MEMORY * self._pace + (1 - PACE_MEMORY) * min(gain, MOST_PACE)

    def _start(self, gain: float) -> None:
        """All rows run ahead, or else all wait."""
        self._pace = min(gain, MOST_PACE)
        drafted = np.flatnonzero(self._is_seated & (self._most > 0))
        self._is_ahead = bool(self._may_run_ahead[drafted].all())
        self._is_waiting = not self._is_ahead
        if self._is_ahead:
            self._end_guesses(drafted, is_wrong=np.zeros(drafted.size, np.bool_))
            self.runs_ahead[:] = self._is_seated & self._may_run_ahead
        else:
            self.needs_result[:] = self._is_seated

    def _stop(self) -> None:
        self._is_waiting = self._is_ahead = False
        self.needs_result[:] = self.runs_ahead[:] = False

    def _choose(self, rows: Rows, num_offered: Int32Array, num_rows: int, total: int) -> Choice:
        acceptance = self._acceptance.of(rows, self._match_lens[rows])
        stands = expected(acceptance, num_offered, self.max_drafts)
        return choose(stands, self._costs, num_rows, total)

    def _guess(self, table: RequestTable, rows: Rows, most: Int32Array) -> None:
        """Replaces guesses by those after all known tokens that promise most."""
        self._end_guesses(rows, is_wrong=np.zeros(rows.size, np.bool_))
        self._guessed_from[rows], self._match_lens[rows] = table.num_known[rows], 0
        wanted, chances = self._wanted[rows], self._acceptance.by_match
        is_any = wanted == ANY
        for i, drafter in enumerate(self._drafters):
            asked = is_any | (wanted == i)
            some, few = (rows, most) if asked.all() else (rows[asked], most[asked])
            if not some.size:
                continue
            found = drafter.propose(some.astype(np.int32), table.token_ids, table.num_known[some], few)
            guesses = self._guesses, self._num_guesses, self._match_lens
            better_taker()(some, *found, few, self._vocab_size, chances, *guesses)

    def _compare(self, table: RequestTable, rows: Rows, first: Int32Array) -> None:
        """Notes which of the row's guessed tokens were sampled."""
        ends = np.empty(rows.size, np.int32)
        guesses = self._guesses, self._num_guesses, self._guessed_from
        comparer()(rows, first, table.num_known, table.token_ids, *guesses, self._num_right, ends)
        over = np.flatnonzero(ends)
        if over.size:
            self._end_guesses(rows[over], is_wrong=ends[over] == WRONG)

    def _end_guesses(self, rows: Rows, *, is_wrong: BoolArray) -> None:
        is_noted = is_wrong | (self._num_right[rows] > 0)
        noted = rows[is_noted]
        if noted.size:
            self._acceptance.note(noted, self._match_lens[noted], self._num_right[noted], is_wrong[is_noted])
        self._num_guesses[rows] = self._num_right[rows] = 0
