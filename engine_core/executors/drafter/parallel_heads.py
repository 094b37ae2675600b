"""Medusa's heads over rows of a request table: all drafts of a step come from the hidden state
that the served model left behind its last step."""

from __future__ import annotations

import torch

from ...config import EngineConfig
from ...heads.medusa import Medusa
from ..entry.eager_entry import EagerStep
from .eager_drafter import Drafts, picked
from .recent_states import RecentStates


class ParallelHeads:
    """See `EagerDrafter`. Heads keep nothing of a cached prefix."""

    layers: tuple[int, ...] = ()
    looks_at_all = False

    def __init__(
        self,
        heads: Medusa,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        drafts: Drafts,
    ) -> None:
        self._heads = heads
        self._drafts = drafts
        self.most = min(heads.num_heads, config.max_draft_tokens)
        width = config.max_draft_tokens + 1
        self._states = RecentStates(config.num_rows, width, heads.hidden_size, dtype, device)

    def seat(self, row: int) -> None:
        """Does nothing: what the row's last request left is overwritten before anything is
        drafted."""

    def draft(self, sent: EagerStep) -> None:
        num_drafts = sent.num_drafted
        is_drafted = num_drafts > 0
        rows = sent.plan.rows[is_drafted]
        at = sent.ends[is_drafted]
        num_left = num_drafts[is_drafted]
        # The last known token was sampled from the state of the position before it.
        hidden = self._states.get(rows, at - 2)
        for head in range(self._heads.num_heads):
            if not rows.size:
                return
            self._drafts.put(self._heads.logits(head, hidden), rows, at)
            goes_on = num_left > 1
            hidden = picked(hidden, goes_on)
            rows = rows[goes_on]
            at = at[goes_on] + 1
            num_left = num_left[goes_on] - 1

    def see(self, sent: EagerStep, hidden: torch.Tensor) -> None:
        plan = sent.plan
        counts = sent.num_sampled
        is_sampled = counts > 0
        first = plan.starts + plan.counts - counts
        final = sent.final(hidden)
        self._states.put(plan.rows[is_sampled], first[is_sampled], counts[is_sampled], final)
