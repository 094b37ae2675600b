"""Drafts the tokens that a row's grammar forces, before any drafter is asked.

Whoever fills the masks of a row says with them which tokens the grammar forces from there on: the
only ones that the masks of their places allow. They are verified as all drafts are, so a false
claim costs time only. Knows nothing about grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from headwater.kernels.cpu.guesses import comparer

from ..executor import BoolArray, Int32Array
from .masks import RowIndices
from .request_state import RequestState
from .request_table import RequestTable
from .speculator import Speculator
from .stop_ids import NO_TOKEN


class GrammarDrafts:
    """See `Speculator`. A row waits for its result while more of its tokens are forced than the one
    that is computed; everything else is another speculator's."""

    def __init__(self, speculator: Speculator, *, num_rows: int, vocab_size: int) -> None:
        """`speculator` drafts where nothing is forced; `num_rows`: of the request table."""
        self.max_drafts = speculator.max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._speculator = speculator
        self._vocab_size = vocab_size
        self._is_awaited: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that wait for the sake of what is forced."""
        self._most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        # While a step computes a whole draft, its row is told of that draft again and of what
        # follows it.
        self._forced: Int32Array = np.zeros((num_rows, 2 * self.max_drafts + 1), np.int32)
        self._num_forced: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the row's run; 0 once one of them is known to be wrong, or all are known."""
        self._forced_from: Int32Array = np.zeros(num_rows, np.int32)
        """Position of the run's first token."""
        self._num_right: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the run that were sampled so far."""

    @property
    def num_bytes(self) -> int:
        return self._speculator.num_bytes

    def seat(self, request: RequestState) -> None:
        self._speculator.seat(request)
        row = request.row
        asked = request.speculation
        is_served = request.has_grammar and asked.is_on and not asked.drafter
        self._most[row] = (
            min(asked.max_tokens or self.max_drafts, self.max_drafts) if is_served else 0
        )
        self._num_forced[row] = 0
        self._is_awaited[row] = False
        self._note_needs()

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self._speculator.vacate(row, token_ids)
        self._most[row] = 0
        self._num_forced[row] = 0
        self._is_awaited[row] = False
        self._note_needs()

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """As many tokens count as fit, and none from the first on that is no token."""
        most = np.where(self._most[rows] > 0, self._forced.shape[1], 0).tolist()
        runs = [ids[:num] for ids, num in zip(token_ids, most, strict=True)]
        is_told = np.arange(self._forced.shape[1]) < np.array([len(run) for run in runs])[:, None]
        told = np.full(is_told.shape, NO_TOKEN)
        told[is_told] = list(chain.from_iterable(runs))
        is_token = (told >= 0) & (told < self._vocab_size)
        self._forced[rows] = np.where(is_token, told, 0)
        self._num_forced[rows] = np.logical_and.accumulate(is_token, axis=1).sum(axis=1)
        self._forced_from[rows] = table.num_known[rows]
        self._num_right[rows] = 0
        self._await(table, rows)

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        self._speculator.settle(table, rows, first)
        is_forced = self._num_forced[rows] > 0
        if is_forced.any():
            self._compare(table, rows[is_forced], first[is_forced])
        self._note_needs()

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        self._speculator.settle_drafts(rows, most, num_drafts, num_accepted)

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        num_drafts = self._speculator.lengths(rows, most, total)
        self._note_needs()
        return num_drafts

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        num_left = self._num_forced[rows] - self._num_right[rows]
        num_forced = np.minimum(np.minimum(num_left, most), self._most[rows])
        forced = np.flatnonzero(num_forced)
        num_drafts, draft_ids = self._drafts_of_others(table, rows, most, total)
        if draft_ids is None and forced.size:
            # The executor would draft for others: a step has drafts from here or its own.
            num_drafts = np.zeros(rows.size, np.int32)
            draft_ids = np.zeros((rows.size, self.max_drafts), np.int32)
        if draft_ids is not None and forced.size:
            places = np.arange(self.max_drafts)
            at = np.minimum(self._num_right[rows[forced], None] + places, self._forced.shape[1] - 1)
            forced_ids = self._forced[rows[forced, None], at]
            # A guess that begins with all that is forced goes on behind it.
            agrees = (forced_ids == draft_ids[forced]) | (places >= num_forced[forced, None])
            is_better = ~agrees.all(axis=1) | (num_drafts[forced] < num_forced[forced])
            better = forced[is_better]
            num_drafts[better] = num_forced[better]
            draft_ids[better] = forced_ids[is_better]
            num_drafts = np.clip(
                total - (np.cumsum(num_drafts) - num_drafts), 0, num_drafts
            ).astype(np.int32)
        self._note_needs()
        return num_drafts, draft_ids

    def _drafts_of_others(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        """Drafts of the other speculator for rows that wait for its sake: counts [R] and ids [R,
        max_drafts], or None where it leaves that to the executor."""
        num_drafts = np.zeros(rows.size, np.int32)
        draft_ids = np.zeros((rows.size, self.max_drafts), np.int32)
        waits = self._speculator.needs_result[rows]
        if waits.any():
            num_drafts, ids = self._speculator.draft(
                table, rows, np.where(waits, most, 0).astype(np.int32), total
            )
            if ids is None:
                return num_drafts, None
            draft_ids[:, : ids.shape[1]] = ids
        return num_drafts, draft_ids

    def _compare(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        """Notes which forced tokens were sampled."""
        ends = np.empty(rows.size, np.int32)
        runs = self._forced, self._num_forced, self._forced_from
        comparer()(rows, first, table.num_known, table.token_ids, *runs, self._num_right, ends)
        over = rows[ends != 0]
        self._num_forced[over] = self._num_right[over] = 0
        self._await(table, rows)

    def _await(self, table: RequestTable, rows: RowIndices) -> None:
        """Notes rows with tokens to draft; one that a step in flight samples needs no draft."""
        is_planned = table.num_computed[rows] >= table.num_known[rows]
        self._is_awaited[rows] = self._num_forced[rows] - self._num_right[rows] > is_planned
        self._note_needs()

    def _note_needs(self) -> None:
        np.logical_or(self._is_awaited, self._speculator.needs_result, out=self.needs_result)
        # A step has drafts from here or those of the executor.
        np.logical_and(self._speculator.runs_ahead, not self._is_awaited.any(), out=self.runs_ahead)
