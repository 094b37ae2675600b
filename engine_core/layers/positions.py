"""Learned vectors of positions."""

from __future__ import annotations

import torch


class Positions:
    def __init__(self, table: torch.Tensor, offset: int = 0) -> None:
        """table [positions + offset, H]; without rows where another stage of a pipeline adds
        them."""
        self._table = table
        self._offset = offset

    def add_to(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """rows [T, H] and positions int64 [T] → [T, H]"""
        return rows + self._table[positions + self._offset] if len(self._table) else rows
