"""A speculator whose rows wait for their results from their first token to their last, whatever
that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable


class FixedSpeculator:
    """What it drafts, `draft` of a subclass says."""

    num_bytes = 0

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(0, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(0, np.bool_)

    def beside(self, config: EngineConfig) -> Self:
        """The same, for the engine of this config."""
        self.needs_result, self.runs_ahead = np.zeros((2, config.num_rows), np.bool_)
        return self

    def serves(self, request: RequestState) -> bool:
        return True

    def seat(self, request: RequestState) -> None:
        self.needs_result[request.row] = self.serves(request)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = False

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        pass

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        pass

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        raise AssertionError("the executor drafted, and was not asked to")

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        raise AssertionError("no row runs ahead")


class Undrafted(FixedSpeculator):
    """Has no drafts for any row, and is not asked for any."""

    def serves(self, request: RequestState) -> bool:
        return False

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        raise AssertionError("no row waits for it")
