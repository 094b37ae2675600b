"""Drafts tokens where that brings more of them a second, and else lets steps run ahead of their results.

Drafts need results: a row's next plan waits for the last one's, which costs a gap. So either all rows wait or none:
rows that do not wait would be computed beside those that do in every second step only. While none waits, guesses are
made all the same and compared with what is sampled, so that acceptance is known before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.engine_core.drafting.acceptance import Acceptance
from headwater.engine_core.drafting.draft_lengths import Choice, choose, expected
from headwater.engine_core.drafting.drafter import Drafter
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable

WORTHWHILE = 1.05
"""Gain from which on rows wait for results."""
ANY = -1


class AdaptiveSpeculator:
    """See `Speculator`."""

    def __init__(
        self, drafters: Sequence[Drafter], costs: StepCosts, *, num_rows: int, max_drafts: int, vocab_size: int
    ) -> None:
        """`num_rows`: of the request table."""
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self._drafters, self._costs, self._vocab_size = tuple(drafters), costs, vocab_size
        self._acceptance = Acceptance(num_rows)
        self._is_waiting = False
        self._is_seated: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that a request has: those that wait when rows wait."""
        self._most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        self._wanted: Int32Array = np.full(num_rows, ANY, np.int32)
        """The drafter that each row's request names."""
        self._guesses: Int32Array = np.zeros((num_rows, max_drafts), np.int32)
        self._num_guesses: Int32Array = np.zeros(num_rows, np.int32)
        """Of the row's last guess; 0 once it is known to be wrong, or behind us."""
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
        self.needs_result[row] = self._is_waiting
        self._num_guesses[row] = 0
        self._acceptance.reset(row)
        for drafter in self._drafters:
            drafter.seat(row, request.chain.namespace, request.num_prompt_tokens)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = self._is_seated[row] = False
        self._most[row] = self._num_guesses[row] = 0
        for drafter in self._drafters:
            drafter.vacate(row, token_ids)

    def settle(self, table: RequestTable, rows: Rows, first: Int32Array) -> None:
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
            if self._choose(rows, num_left, num_decoding, num_decoding * self.max_drafts).gain > WORTHWHILE:
                self._wait(is_waiting=True)

    def draft(self, table: RequestTable, rows: Rows, most: Int32Array, total: int) -> tuple[Int32Array, Int32Array]:
        most = np.minimum(most, self._most[rows])
        num_drafts = np.zeros(rows.size, np.int32)
        drafted = np.flatnonzero(most > 0)
        if drafted.size:
            self._guess(table, rows[drafted], most[drafted])
            num_guesses = self._num_guesses[rows[drafted]]
            num_drafts[drafted] = self._choose(rows[drafted], num_guesses, rows.size, total).num_drafts
        if self._is_waiting and not num_drafts.any() and (most == self._most[rows]).all():
            self._wait(is_waiting=False)
        return num_drafts, self._guesses[rows]

    @property
    def num_bytes(self) -> int:
        return sum(drafter.num_bytes for drafter in self._drafters)

    def _wait(self, *, is_waiting: bool) -> None:
        self._is_waiting = is_waiting
        self.needs_result[:] = self._is_seated & is_waiting

    def _choose(self, rows: Rows, num_offered: Int32Array, num_rows: int, total: int) -> Choice:
        acceptance = self._acceptance.of(rows, self._match_lens[rows])
        stands = expected(acceptance, num_offered, self.max_drafts)
        return choose(stands, self._costs, num_rows, total)

    def _guess(self, table: RequestTable, rows: Rows, most: Int32Array) -> None:
        """Replaces guesses by the best there are after all known tokens."""
        self._end_guesses(rows, is_wrong=np.zeros(rows.size, np.bool_))
        self._guessed_from[rows], self._match_lens[rows] = table.num_known[rows], 0
        for i, drafter in enumerate(self._drafters):
            asked = (self._wanted[rows] == ANY) | (self._wanted[rows] == i)
            if not asked.any():
                continue
            some = rows[asked]
            found = drafter.propose(some.astype(np.int32), table.token_ids, table.num_known, most[asked])
            num_found = self._legal(found.draft_ids, np.minimum(found.num_drafts, most[asked]))
            is_better = (num_found > 0) & (found.match_lens > self._match_lens[some])
            better, width = some[is_better], found.draft_ids.shape[1]
            self._guesses[better, :width] = found.draft_ids[is_better]
            self._num_guesses[better] = num_found[is_better]
            self._match_lens[better] = found.match_lens[is_better]

    def _legal(self, draft_ids: Int32Array, num_drafts: Int32Array) -> Int32Array:
        """How many of each row's drafts stand before the first that is no token."""
        num_drafts = np.clip(num_drafts, 0, min(draft_ids.shape[1], self.max_drafts))
        is_illegal = (draft_ids < 0) | (draft_ids >= self._vocab_size)
        is_illegal &= np.arange(draft_ids.shape[1]) < num_drafts[:, None]
        if not is_illegal.any():
            return num_drafts
        return np.where(is_illegal.any(axis=1), is_illegal.argmax(axis=1), num_drafts).astype(np.int32)

    def _compare(self, table: RequestTable, rows: Rows, first: Int32Array) -> None:
        """Notes which of the row's guessed tokens were sampled."""
        is_guessed = self._num_guesses[rows] > 0
        rows, first = rows[is_guessed], first[is_guessed]
        known = table.num_known[rows]
        while rows.size:
            at = first - self._guessed_from[rows]
            is_right = self._guesses[rows, at] == table.token_ids[rows, first]
            self._num_right[rows] += is_right
            is_over = ~is_right | (at + 1 == self._num_guesses[rows])
            if is_over.any():
                self._end_guesses(rows[is_over], is_wrong=~is_right[is_over])
            first = first + 1
            goes_on = ~is_over & (first < known)
            rows, first, known = rows[goes_on], first[goes_on], known[goes_on]

    def _end_guesses(self, rows: Rows, *, is_wrong: BoolArray) -> None:
        is_noted = is_wrong | (self._num_right[rows] > 0)
        noted = rows[is_noted]
        if noted.size:
            self._acceptance.note(noted, self._match_lens[noted], self._num_right[noted], is_wrong[is_noted])
        self._num_guesses[rows] = self._num_right[rows] = 0
