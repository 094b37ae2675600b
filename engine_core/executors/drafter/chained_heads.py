"""EAGLE's layer over rows of a request table. It reads pairs, the hidden state of a position and
the token after it, at the place of the former.

Keys and values of pairs lie in the same KV blocks after those of the served model, so a cached
prefix has them but for its last pair, whose token differs from request to request. Where they are
missing drafts are worse; verification sees to the rest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array
from ...heads.registry import ChainHeads
from ...ragged import places
from ..entry.eager_entry import EagerStep
from ..table.batch import ragged_batch
from ..table.eager_table import EagerTable
from .computed_positions import CATCH_UP, UNKNOWN
from .eager_drafter import Drafts, picked
from .recent_states import RecentStates


class ChainedHeads:
    """See `EagerDrafter`."""

    def __init__(
        self,
        heads: ChainHeads,
        config: EngineConfig,
        kv_cache: torch.Tensor,
        table: EagerTable,
        drafts: Drafts,
    ) -> None:
        """kv_cache [1, 2, num_blocks, Hk, block_size, D] of the layer's own, of the dtype of hidden
        states."""
        layer = heads.config
        num_rows = config.num_rows
        self.most = config.max_draft_tokens
        self.layers = heads.layers
        self.looks_at_all = heads.looks_at_all
        self._heads = heads
        self._block_size = config.block_size
        self._device = kv_cache.device
        self._kv_cache = kv_cache
        self._table = table
        self._drafts = drafts
        # States that wait to be caught up, and states of the last step.
        width = CATCH_UP + config.max_draft_tokens + 1
        self._states = RecentStates(
            num_rows, width, layer.hidden_size, kv_cache.dtype, kv_cache.device
        )
        self._num_kept: Int32Array = np.full(num_rows, UNKNOWN, np.int32)
        """Number of each row's leading pairs whose keys and values are computed; for a row that was
        just seated, assumed equal to the served model's computed tokens."""

    def seat(self, row: int) -> None:
        self._num_kept[row] = UNKNOWN

    def draft(self, sent: EagerStep) -> None:
        rows = sent.plan.rows
        starts = sent.plan.starts
        ends = sent.ends
        num_drafts = sent.num_drafted
        kept = self._kept(rows, starts)
        is_drafted = num_drafts > 0
        # A row whose hidden states were not seen drafts from the state that another request left
        # there.
        kept = np.where(is_drafted, np.maximum(np.minimum(kept, starts - 1), 0), kept)
        lag = np.maximum(starts - kept, is_drafted)
        is_computed = lag > 0 if (lag >= CATCH_UP).any() else is_drafted
        self._num_kept[rows] = np.where(is_computed, starts, kept)
        if not is_computed.any():
            return
        computed = rows[is_computed], kept[is_computed], lag[is_computed]
        hidden = self._read(
            *computed, self._waiting(*computed), is_drafted[is_computed].astype(np.int32)
        )
        rows = rows[is_drafted]
        at = ends[is_drafted]
        num_left = num_drafts[is_drafted]
        while rows.size:
            self._drafts.put(self._heads.logits(hidden), rows, at)
            goes_on = num_left > 1
            hidden = picked(hidden, goes_on)
            rows = rows[goes_on]
            at = at[goes_on] + 1
            num_left = num_left[goes_on] - 1
            if rows.size:
                # The token drafted last stands after the position before it.
                ones = np.ones_like(rows)
                hidden = self._read(rows, at - 2, ones, hidden, ones)

    def see(self, sent: EagerStep, hidden: torch.Tensor) -> None:
        """Computes the pairs of prompt chunks at once, so that they are cached with the blocks. A
        chunk's last pair, and those of decode rows, wait until their next token is known."""
        rows = sent.plan.rows
        starts = sent.plan.starts
        counts = sent.plan.counts
        inputs = {} if sent.inputs is None else sent.inputs.states
        features = self._heads.features(hidden, inputs)
        kept = self._kept(rows, starts)
        num_certain = counts - sent.num_drafts
        self._num_kept[rows] = kept
        is_read = num_certain > 1
        if is_read.any():
            num_old = (starts - kept)[is_read]
            num_new = num_certain[is_read] - 1
            first = (np.cumsum(counts) - counts)[is_read]
            old = self._waiting(rows[is_read], kept[is_read], num_old)
            new = features[
                torch.from_numpy(np.repeat(first, num_new) + places(num_new))
                .long()
                .to(self._device)
            ]
            pairs = _interleaved(old, num_old, new, num_new)
            nothing = np.zeros_like(num_new)
            self._read(rows[is_read], kept[is_read], num_old + num_new, pairs, nothing)
            self._num_kept[rows[is_read]] = starts[is_read] + num_new
        self._states.put(rows, starts, counts, features)

    def _kept(self, rows: Int32Array, starts: Int32Array) -> Int32Array:
        kept = self._num_kept[rows]
        # Positions after `starts` are those of rejected drafts.
        found: Int32Array = np.where(kept == UNKNOWN, starts, np.minimum(kept, starts)).astype(
            np.int32
        )
        return found

    def _waiting(self, rows: Int32Array, starts: Int32Array, counts: Int32Array) -> torch.Tensor:
        """Features of positions starts[i] … starts[i] + counts[i] − 1 of rows[i], seen in earlier
        steps."""
        return self._states.get(np.repeat(rows, counts), np.repeat(starts, counts) + places(counts))

    def _read(
        self,
        rows: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
        features: torch.Tensor,
        num_wanted: Int32Array,
    ) -> torch.Tensor:
        """Hidden states behind the last num_wanted[i] pairs of each row, [sum of num_wanted, H]."""
        tables = self._table.token_ids, self._table.block_ids
        batch = ragged_batch(rows, starts, counts, num_wanted, *tables, self._block_size)
        table_rows = torch.from_numpy(np.repeat(rows, counts)).long()
        batch = replace(
            batch, token_ids=self._table.token_ids[table_rows, batch.positions + 1].long()
        )
        batch = batch.to(self._device)
        ends = self._heads.ends(batch, num_wanted)
        return self._heads.forward(batch, features, self._kv_cache, ends=ends)


def _interleaved(
    old: torch.Tensor, num_old: Int32Array, new: torch.Tensor, num_new: Int32Array
) -> torch.Tensor:
    """Concatenates, row by row, the old entries and the new ones."""
    if not len(old):
        return new
    counts = num_old + num_new
    is_old = torch.from_numpy(places(counts) < np.repeat(num_old, counts)).to(new.device)
    pairs = new.new_empty(len(is_old), new.shape[1])
    pairs[is_old] = old
    pairs[~is_old] = new
    return pairs
