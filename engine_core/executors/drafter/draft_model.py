"""A smaller model that guesses what follows the known tokens of rows of a request table.

Its keys and values lie in planes of their own of the same KV blocks, so a cached prefix has them as
well. Where they are missing, as for the last positions before a request left its row, guesses are
worse; verification sees to the rest.
"""

from __future__ import annotations

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array
from ...models.model import Model
from ..model.new_cache import NewCache, private_cache
from ..table.batch import ragged_batch
from .computed_positions import ComputedPositions
from .device_drafter import Computed, Draw


class DraftModel:
    """See `DeviceDrafter`."""

    layers: tuple[int, ...] = ()
    looks_at_all = False

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        device: torch.device,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
        new_cache: NewCache = private_cache,
    ) -> None:
        model = decoder.config
        self.most = config.max_draft_tokens
        self._decoder = decoder
        self._block_size = config.block_size
        self._device = device
        self._token_table = token_table
        self._block_table = block_table
        shape = (
            model.num_layers,
            2,
            config.num_blocks,
            model.num_kv_heads,
            config.block_size,
            model.head_dim,
        )
        self._kv_cache = new_cache(shape, kv_dtype, device)
        self.kv_caches = (self._kv_cache,)
        self._kept = ComputedPositions(config.num_rows)

    def seat(self, row: int) -> None:
        self._kept.seat(row)

    def follow(
        self,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        draw: Draw,
    ) -> None:
        caught = self._kept.take(rows, starts, ends, num_drafts)
        if caught is None:
            return
        index = caught.index
        is_drafted = caught.is_guessed
        logits = self._logits(
            rows[index], caught.starts, caught.counts, is_drafted.astype(np.int32)
        )
        drafted = index[is_drafted]
        rows = rows[drafted]
        at = ends[drafted]
        num_left = num_drafts[drafted]
        while rows.size:
            tokens = draw(logits, rows, at)
            self._token_table[torch.from_numpy(rows).long(), torch.from_numpy(at).long()] = (
                torch.from_numpy(tokens)
            )
            goes_on = num_left > 1
            rows = rows[goes_on]
            at = at[goes_on]
            num_left = num_left[goes_on] - 1
            if rows.size:
                ones = np.ones_like(rows)
                logits = self._logits(rows, at, ones, ones)
                at = at + 1

    def see(self, computed: Computed) -> None:
        """Does nothing: the model computes the tokens itself."""

    def _logits(
        self, rows: Int32Array, starts: Int32Array, counts: Int32Array, num_wanted: Int32Array
    ) -> torch.Tensor:
        """Returns the logits of the last num_wanted[i] positions of each row, [sum of num_wanted,
        V]."""
        tables = self._token_table, self._block_table
        batch = ragged_batch(rows, starts, counts, num_wanted, *tables, self._block_size).to(
            self._device
        )
        hidden = self._decoder.forward(
            batch, self._kv_cache, ends=self._decoder.ends(batch, num_wanted)
        )
        return self._decoder.logits(hidden) if len(hidden) else hidden
