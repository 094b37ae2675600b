"""From token ids to rows of a table."""

from __future__ import annotations

import torch


class Embedding:
    def __init__(self, table: torch.Tensor) -> None:
        """table [V, H]"""
        self.table = table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [T] → [T, H], a copy."""
        return self.table[token_ids]
