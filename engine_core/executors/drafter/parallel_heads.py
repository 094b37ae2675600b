"""Medusa's heads over rows of a request table: all guesses of a step come from the hidden state
that the served model left behind its last step."""

from __future__ import annotations

import torch

from ...config import EngineConfig
from ...executor import Int32Array
from ...heads.medusa import Medusa
from .device_drafter import Computed, Draw
from .recent_states import RecentStates


class ParallelHeads:
    """See `DeviceDrafter`. Heads keep nothing of a cached prefix."""

    layers: tuple[int, ...] = ()
    looks_at_all = False
    kv_caches: tuple[torch.Tensor, ...] = ()

    def __init__(
        self, heads: Medusa, config: EngineConfig, dtype: torch.dtype, token_table: torch.Tensor
    ) -> None:
        self._heads = heads
        self._token_table = token_table
        self.most = min(heads.num_heads, config.max_draft_tokens)
        width = config.max_draft_tokens + 1
        self._states = RecentStates(
            config.num_rows, width, heads.hidden_size, dtype, token_table.device
        )

    def seat(self, row: int) -> None:
        """Does nothing: what the row's last request left is overwritten before anything is
        guessed."""

    def follow(
        self,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        draw: Draw,
    ) -> None:
        is_drafted = num_drafts > 0
        rows = rows[is_drafted]
        at = ends[is_drafted]
        num_left = num_drafts[is_drafted]
        # The last known token was sampled from the state of the position before it.
        hidden = self._states.get(rows, at - 2)
        for head in range(self._heads.num_heads):
            if not rows.size:
                return
            tokens = draw(self._heads.logits(head, hidden), rows, at)
            self._token_table[torch.from_numpy(rows).long(), torch.from_numpy(at).long()] = (
                torch.from_numpy(tokens)
            )
            goes_on = num_left > 1
            hidden = hidden[torch.from_numpy(goes_on).to(hidden.device)]
            rows = rows[goes_on]
            at = at[goes_on] + 1
            num_left = num_left[goes_on] - 1

    def see(self, computed: Computed) -> None:
        counts = computed.num_sampled
        is_sampled = counts > 0
        first = computed.starts + computed.counts - counts
        self._states.put(
            computed.rows[is_sampled], first[is_sampled], counts[is_sampled], computed.final
        )
