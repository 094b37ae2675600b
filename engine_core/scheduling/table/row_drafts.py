"""Drafts in flight of the rows of the request table, and how many were accepted."""

from __future__ import annotations

import numpy as np

from ...executor import BoolArray, Int32Array
from .masks import RowIndices
from .request_state import RequestState


class RowDrafts:
    def __init__(
        self, num_rows: int, needs_result: BoolArray, runs_ahead: BoolArray, *, is_on: bool
    ) -> None:
        """`needs_result`, `runs_ahead` [rows]: columns of the speculator; `is_on`: it drafts."""
        self.is_on = is_on
        """Whether any row may have drafts."""
        self.needs_result = needs_result
        """Whether the row is planned only when no step of it is in flight. The speculator may
        change it between steps."""
        self.runs_ahead = runs_ahead
        """Whether the executor drafts for the row, which is then also planned while the number of
        its tokens is not known. The speculator may change it between steps."""
        self._num_uncertain: Int32Array = np.zeros(num_rows, np.int32)
        """Number of steps, in flight or held, that verify drafts of the row, so its number of
        computed tokens may decrease."""
        self._awaits: BoolArray = np.zeros(num_rows, np.bool_)
        """Whether such a step has drafts that the plan names: the row computes nothing after them
        yet."""
        self._num_drafted: Int32Array = np.zeros(num_rows, np.int32)
        """Drafted tokens of the row that were verified; see `count`."""
        self._num_accepted: Int32Array = np.zeros(num_rows, np.int32)
        """Drafted tokens that were verified and accepted."""

    def seat(self, row: int) -> None:
        self._num_uncertain[row] = 0
        self._awaits[row] = False

    def note_planned(self, rows: RowIndices, num_drafts: Int32Array, *, are_given: bool) -> None:
        """Notes a step that verifies drafts; `are_given`: its plan names them."""
        self._num_uncertain[rows] += num_drafts > 0
        self._awaits[rows] = (num_drafts > 0) & are_given

    def note_result(
        self, rows: RowIndices, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        self._num_drafted[rows] += num_drafts
        self._num_accepted[rows] += num_accepted

    def settle(self, rows: RowIndices, had_drafts: BoolArray) -> None:
        """The rows that had drafts in a step are less uncertain by that step."""
        self._num_uncertain[rows] -= had_drafts
        self._awaits[rows] &= ~had_drafts

    def are_uncertain(self, rows: RowIndices) -> BoolArray | None:
        """Whether the host does not know how far each row came; None: it knows of all."""
        if not self.is_on or not np.count_nonzero(uncertain := self._num_uncertain[rows]):
            return None
        is_uncertain: BoolArray = uncertain > 0
        return is_uncertain

    def have_to_wait(self) -> BoolArray:
        """[table rows] Whether a row may be planned only when nothing of it is in flight. A row
        that needs no more results may still have drafts in flight."""
        return self.needs_result | self._awaits | ((self._num_uncertain > 0) & ~self.runs_ahead)

    def count(self, request: RequestState) -> None:
        """Adds to the request what became of its drafts since this was last done."""
        row = request.row
        request.num_draft_tokens += int(self._num_drafted[row])
        request.num_accepted_tokens += int(self._num_accepted[row])
        self._num_drafted[row] = self._num_accepted[row] = 0
