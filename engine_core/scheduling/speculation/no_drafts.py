"""Speculation of an engine that drafts nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable


class NoDrafts:
    """See `Speculator`. No row waits or runs ahead."""

    max_drafts = 0
    num_bytes = 0

    def __init__(self, num_rows: int) -> None:
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)

    def seat(self, request: RequestState) -> None: ...

    def vacate(self, row: int, token_ids: Int32Array) -> None: ...

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None: ...

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None: ...

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        raise AssertionError("no step has drafts")

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        raise AssertionError("no row runs ahead")

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        raise AssertionError("no row waits for its result")
