"""A speculator whose rows without a grammar run ahead of their results all the time; the executor
drafts."""

from __future__ import annotations

import numpy as np

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from tests.engine_core.fixed_speculator import FixedSpeculator


class AheadSpeculator(FixedSpeculator):
    def __init__(self, max_drafts: int, seed: int | None = None) -> None:
        """With a seed rows get so many drafts as it draws, 0 among them, else all they may."""
        super().__init__(max_drafts)
        self._rng = None if seed is None else np.random.default_rng(seed)

    def seat(self, request: RequestState) -> None:
        self.runs_ahead[request.row] = not request.has_grammar

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.runs_ahead[row] = False

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        assert (num_accepted <= num_drafts).all()
        assert (num_drafts <= most).all()

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        return most if self._rng is None else self._rng.integers(0, most + 1).astype(np.int32)
