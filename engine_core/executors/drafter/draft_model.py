"""A smaller model that drafts what follows the known tokens of rows of a request table.

Its keys and values lie in the same KV blocks after those of the served model, so a cached prefix
has them as well. Where they are missing, as for the last positions before a request left its row,
drafts are worse; verification sees to the rest.
"""

from __future__ import annotations

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array
from ...models.model import Model
from ..entry.eager_entry import EagerStep
from ..table.batch import ragged_batch
from ..table.eager_table import EagerTable
from .computed_positions import ComputedPositions
from .eager_drafter import Drafts


class DraftModel:
    """See `EagerDrafter`."""

    layers: tuple[int, ...] = ()
    looks_at_all = False

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_cache: torch.Tensor,
        table: EagerTable,
        drafts: Drafts,
    ) -> None:
        """kv_cache [layers, 2, num_blocks, Hk, block_size, D] of the model's own."""
        self.most = config.max_draft_tokens
        self._decoder = decoder
        self._block_size = config.block_size
        self._device = kv_cache.device
        self._kv_cache = kv_cache
        self._table = table
        self._drafts = drafts
        self._kept = ComputedPositions(config.num_rows)

    def seat(self, row: int) -> None:
        self._kept.seat(row)

    def draft(self, sent: EagerStep) -> None:
        rows = sent.plan.rows
        starts = sent.plan.starts
        ends = sent.ends
        num_drafts = sent.num_drafted
        caught = self._kept.take(rows, starts, ends, num_drafts)
        if caught is None:
            return
        index = caught.index
        is_drafted = caught.is_drafted
        logits = self._logits(
            rows[index], caught.starts, caught.counts, is_drafted.astype(np.int32)
        )
        drafted = index[is_drafted]
        rows = rows[drafted]
        at = ends[drafted]
        num_left = num_drafts[drafted]
        while rows.size:
            self._drafts.put(logits, rows, at)
            goes_on = num_left > 1
            rows = rows[goes_on]
            at = at[goes_on]
            num_left = num_left[goes_on] - 1
            if rows.size:
                ones = np.ones_like(rows)
                logits = self._logits(rows, at, ones, ones)
                at = at + 1

    def see(self, sent: EagerStep, hidden: torch.Tensor) -> None:
        """Does nothing: the model computes the tokens itself."""

    def _logits(
        self, rows: Int32Array, starts: Int32Array, counts: Int32Array, num_wanted: Int32Array
    ) -> torch.Tensor:
        """Returns the logits of the last num_wanted[i] positions of each row, [sum of num_wanted,
        V]."""
        tables = self._table.token_ids, self._table.block_ids
        batch = ragged_batch(rows, starts, counts, num_wanted, *tables, self._block_size).to(
            self._device
        )
        hidden = self._decoder.forward(
            batch, self._kv_cache, ends=self._decoder.ends(batch, num_wanted)
        )
        return self._decoder.logits(hidden) if len(hidden) else hidden
