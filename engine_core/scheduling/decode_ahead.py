"""More than one token for decode rows of a step: drafts.

Uses what the step leaves of the budget and of free blocks; knows nothing about waiting requests.
"""

from __future__ import annotations

import numpy as np

from ..config import EngineConfig
from ..kv.block_pool import BlockPool
from .request_table import RequestTable
from .speculator import Speculator
from .step_builder import StepBuilder


class DecodeAhead:
    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        speculator: Speculator | None,
        config: EngineConfig,
    ) -> None:
        self._table = table
        self._pool = pool
        self._speculator = speculator
        self._max_positions = config.max_positions

    def add_drafts(self, step: StepBuilder, num_running: int) -> None:
        """Guesses for rows that decode, the speculator's or the executor's own, with the budget
        that is left and blocks that no other row can need."""
        table = self._table
        rows = step.decode_rows
        speculator = self._speculator
        if speculator is None:
            return
        runs_ahead = bool(table.runs_ahead[rows].any())
        may_draft = table.runs_ahead[rows] if runs_ahead else table.needs_result[rows]
        if not may_draft.any():
            return
        total = min(step.budget, self._max_positions - step.num_requests)
        most = (
            np.minimum(table.compute_end[rows] - table.num_computed[rows], table.credit[rows]) - 1
        )
        most = np.minimum(most, min(speculator.max_drafts, total)) * may_draft
        room = table.capacity[rows] - table.num_computed[rows] - 1
        if np.count_nonzero(most > room) + num_running > self._pool.num_free:
            most = np.minimum(most, room)
        most = most.astype(np.int32)
        draft_ids = None
        if runs_ahead:
            num_drafts = speculator.lengths(rows, most, total)
        else:
            num_drafts, draft_ids = speculator.draft(table, rows, most, total)
        if (num_all := int(num_drafts.sum())) > total:
            num_drafts = np.clip(
                total - (np.cumsum(num_drafts) - num_drafts), 0, num_drafts
            ).astype(np.int32)
            num_all = int(num_drafts.sum())
        if num_all:
            step.grow(rows[num_drafts > room], table, self._pool)
            step.budget -= num_all
            step.num_drafts = num_drafts
            if draft_ids is not None:
                step.draft_ids = draft_ids[np.arange(draft_ids.shape[1]) < num_drafts[:, None]]
