"""A speculator whose rows wait for their results, run ahead of them or do neither, by lot, so that
plans take every form that the contract of executors allows."""

from __future__ import annotations

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.table.known_positions import repeated
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.replay.loads import Lot

CHANGES = 0.1
"""Share of results after which a row does something else."""


class RandomDrafts(FixedSpeculator):
    """Drafts what followed the last token before, spoiled by lot, or leaves drafts to the
    executor."""

    def __init__(self, seed: int, config: EngineConfig, *, leaves_drafts: bool) -> None:
        """`leaves_drafts`: the executor can draft."""
        super().__init__(config.max_draft_tokens)
        self.beside(config)
        self._lot = Lot(seed)
        self._leaves_drafts = leaves_drafts
        self._requests: dict[int, RequestState] = {}
        """By row."""

    def seat(self, request: RequestState) -> None:
        self._requests[request.row] = request
        self._change(request.row)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        del self._requests[row]
        self.needs_result[row] = self.runs_ahead[row] = False

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        for row in rows.tolist():
            if row in self._requests and self._lot.has(CHANGES):
                self._change(row)

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        assert (num_accepted <= num_drafts).all()
        assert (num_drafts <= most).all()

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        return np.array([self._lot.upto(count) for count in most.tolist()], np.int32)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        if self._leaves_drafts and self._lot.has(0.3):
            # Masks are filled for drafts that are known when a step is planned.
            is_free = [not self._requests[row].has_grammar for row in rows.tolist()]
            return self.lengths(rows, most * np.array(is_free), total), None
        num_drafts = self.lengths(rows, most, total)
        draft_ids = np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            count = int(num_drafts[i])
            draft_ids[i, :count] = self._drafts(row, table.known_ids(row), count)
        return num_drafts, draft_ids

    def _drafts(self, row: int, known: Int32Array, count: int) -> list[int]:
        """`count` tokens; a third of them at random."""
        usual = list(self._requests[row].sampling.allowed_token_ids) or self._lot.tokens(2)
        found = repeated(known, count).tolist() if count else []
        found += [self._lot.one_of(usual) for _ in range(count - len(found))]
        return [token if self._lot.has(0.7) else self._lot.one_of(usual) for token in found]

    def _change(self, row: int) -> None:
        may_run_ahead = self._leaves_drafts and not self._requests[row].has_grammar
        does = self._lot.one_of(["nothing", "waits", "runs ahead" if may_run_ahead else "waits"])
        self.needs_result[row] = does == "waits"
        self.runs_ahead[row] = does == "runs ahead"
