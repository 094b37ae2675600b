"""From token ids to rows of a table."""

from __future__ import annotations

import torch


class Embedding:
    def __init__(self, table: torch.Tensor, *, scale: float | None = None) -> None:
        """table [V, H]; its rows are multiplied by the scale, rounded to their dtype."""
        self.table = table
        self._scale = None if scale is None else torch.tensor(scale).to(table)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [T] → [T, H], a copy."""
        rows = self.table[token_ids]
        return rows if self._scale is None else rows * self._scale
