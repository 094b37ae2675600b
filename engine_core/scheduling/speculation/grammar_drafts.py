"""Speculation of an engine with grammars: tokens that a row's grammar forces are drafted before a
speculator is asked for others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .forced_drafts import ForcedDrafts
from .speculator import Speculator


class GrammarDrafts:
    """See `Speculator`. A row waits for its result while its grammar forces more than the one token
    that is computed; all other drafts are those of another speculator."""

    def __init__(self, speculator: Speculator, *, num_rows: int, vocab_size: int) -> None:
        """`speculator` drafts where nothing is forced; `num_rows`: of the request table."""
        self.max_drafts = speculator.max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._speculator = speculator
        self._forced = ForcedDrafts(num_rows, self.max_drafts, vocab_size)
        self._is_awaited: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that wait for the sake of forced tokens."""

    @property
    def num_bytes(self) -> int:
        return self._speculator.num_bytes

    def seat(self, request: RequestState) -> None:
        self._speculator.seat(request)
        self._forced.seat(request)
        self._is_awaited[request.row] = False
        self._note_needs()

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self._speculator.vacate(row, token_ids)
        self._forced.vacate(row)
        self._is_awaited[row] = False
        self._note_needs()

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        self._forced.note(table, rows, token_ids)
        self._await(table, rows)

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        self._speculator.settle(table, rows, first)
        self._await(table, self._forced.compare(table, rows, first))

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
        num_drafts, draft_ids = self._drafts_of_others(table, rows, most, total)
        forced_ids, num_forced, _ = self._forced.propose(rows, most)
        if num_forced.any():
            if draft_ids is None:
                # The executor would draft for others: a step has drafts from here or the device's.
                num_drafts = np.zeros(rows.size, np.int32)
                draft_ids = np.zeros((rows.size, self.max_drafts), np.int32)
            # A draft that agrees with all forced tokens may go on after them.
            is_free = np.arange(self.max_drafts) >= num_forced[:, None]
            agrees = ((forced_ids == draft_ids) | is_free).all(axis=1)
            is_better = (num_forced > 0) & (~agrees | (num_drafts < num_forced))
            num_drafts[is_better] = num_forced[is_better]
            draft_ids[is_better] = forced_ids[is_better]
            before = np.cumsum(num_drafts) - num_drafts
            num_drafts = np.clip(total - before, 0, num_drafts).astype(np.int32)
        self._note_needs()
        return num_drafts, draft_ids

    def _drafts_of_others(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        """Drafts of the other speculator for rows that wait for their results: counts [R] and ids
        [R, max_drafts], or None where the executor drafts."""
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

    def _await(self, table: RequestTable, rows: RowIndices) -> None:
        """Notes which of these rows have forced tokens to draft."""
        if rows.size:
            self._is_awaited[rows] = self._forced.are_due(table, rows)
        self._note_needs()

    def _note_needs(self) -> None:
        np.logical_or(self._is_awaited, self._speculator.needs_result, out=self.needs_result)
        # A step has drafts from here or those of the executor.
        np.logical_and(self._speculator.runs_ahead, not self._is_awaited.any(), out=self.runs_ahead)
