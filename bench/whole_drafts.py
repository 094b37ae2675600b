"""A speculator that makes the executor draft as many tokens as it may, in each step of each
request, to measure its drafts at any cost. For benchmarks alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable


class WholeDrafts:
    """See `Speculator`."""

    num_bytes = 0

    def __init__(self, num_rows: int, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)

    def seat(self, request: RequestState) -> None:
        self.needs_result[request.row] = True

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = False

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Does nothing: no request has a grammar."""

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        """Does nothing."""

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Does nothing."""

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        return np.zeros(rows.size, np.int32)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, None]:
        wanted = np.minimum(most, self.max_drafts)
        room = np.maximum(total - (np.cumsum(wanted) - wanted), 0)
        return np.minimum(wanted, room).astype(np.int32), None
