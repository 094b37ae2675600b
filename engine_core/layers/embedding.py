"""Embedding: token ids to rows of a table."""

from __future__ import annotations

import torch

from .linear.kinds import Table


class Embedding:
    def __init__(self, table: torch.Tensor | Table, *, scale: float | None = None) -> None:
        """table [V, H]; its rows are multiplied by the scale, rounded to their dtype."""
        self._table = table
        self.dtype = table.dtype
        self._scale = None if scale is None else torch.tensor(scale).to(table.device, table.dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [T] → [T, H], a copy."""
        rows = (
            self._table[token_ids]
            if isinstance(self._table, torch.Tensor)
            else self._table.rows(token_ids)
        )
        return rows if self._scale is None else rows * self._scale
