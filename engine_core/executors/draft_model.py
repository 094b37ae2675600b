"""A smaller model that guesses what follows the known tokens of rows of a request table.

Its keys and values lie in planes of their own of the same KV blocks, so a cached prefix has them as well. Where they
are missing, as for the last positions before a request left its row, guesses are worse; verification sees to the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.batch import ragged_batch
from headwater.engine_core.models.model import Model

CATCH_UP = 16
"""Positions of a row after which the model computes what it left out while it drafted nothing: together they take
little longer than one. No block has fewer, so a cached prefix lacks the end of its last block at most."""
UNKNOWN = -1
Draw = Callable[[torch.Tensor, Int32Array, Int32Array], Int32Array]
"""Logits [R, V], table rows [R], and positions [R] of the tokens that are drawn from them → tokens int32 [R]."""


class DraftModel:
    """Reads tokens and blocks from the tables of a `Runner`, int32 [rows, length] and [rows, max blocks], and writes
    its guesses there."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        device: torch.device,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        model = decoder.config
        self._decoder, self._block_size, self._device = decoder, config.block_size, device
        self._token_table, self._block_table = token_table, block_table
        shape = (model.num_layers, 2, config.num_blocks, model.num_kv_heads, config.block_size, model.head_dim)
        self._kv_cache = torch.zeros(shape, dtype=kv_dtype, device=device)
        self._num_kept: Int32Array = np.full(config.max_num_seqs, UNKNOWN, np.int32)
        """Positions of each row, from the first on, whose keys and values are there; of a row that has just been taken
        they are taken to be there as far as the served model's are."""

    def seat(self, row: int) -> None:
        """A request takes the row."""
        self._num_kept[row] = UNKNOWN

    def follow(
        self, rows: Int32Array, starts: Int32Array, ends: Int32Array, num_drafts: Int32Array, draw: Draw
    ) -> None:
        """To be called before the served model computes positions starts[i] … ends[i] − 1 of rows[i], each of which
        holds a known token. Writes num_drafts[i] guesses from position ends[i] on."""
        kept = self._num_kept[rows]
        # Behind `starts` stand guesses that were dropped.
        kept = np.where(kept == UNKNOWN, starts, np.minimum(kept, starts))
        lag, is_drafted = ends - kept, num_drafts > 0
        is_computed = lag > 0 if (lag >= CATCH_UP).any() else is_drafted
        self._num_kept[rows] = np.where(is_computed, ends + np.maximum(num_drafts - 1, 0), kept)
        if not is_computed.any():
            return
        wanted = is_drafted[is_computed].astype(np.int32)
        logits = self._logits(rows[is_computed], kept[is_computed], lag[is_computed], wanted)
        rows, at, num_left = rows[is_drafted], ends[is_drafted], num_drafts[is_drafted]
        while rows.size:
            tokens = draw(logits, rows, at)
            self._token_table[torch.from_numpy(rows).long(), torch.from_numpy(at).long()] = torch.from_numpy(tokens)
            goes_on = num_left > 1
            rows, at, num_left = rows[goes_on], at[goes_on], num_left[goes_on] - 1
            if rows.size:
                ones = np.ones_like(rows)
                logits, at = self._logits(rows, at, ones, ones), at + 1

    def _logits(self, rows: Int32Array, starts: Int32Array, counts: Int32Array, num_wanted: Int32Array) -> torch.Tensor:
        """Returns the logits of the last num_wanted[i] positions of each row, [sum of num_wanted, V]."""
        tables = self._token_table, self._block_table
        batch = ragged_batch(rows, starts, counts, num_wanted, *tables, self._block_size).to(self._device)
        hidden = self._decoder.forward(batch, self._kv_cache, ends=self._decoder.ends(batch, num_wanted))
        return self._decoder.logits(hidden) if len(hidden) else hidden
