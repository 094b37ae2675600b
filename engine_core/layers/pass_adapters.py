"""Adapters of the rows of a forward pass, as models name them."""

from __future__ import annotations

from typing import Protocol

import torch


class PassAdapters(Protocol):
    """Adapters of the rows that a pass computes."""

    def begin(self, slots: torch.Tensor | None) -> None:
        """Begins a pass over rows with adapters in these slots, int32 [T], -1: none; None: no row
        has one."""

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with some of the rows, in this order."""


class NoAdapters:
    """See `PassAdapters`: no layer has adapters behind it."""

    def begin(self, slots: torch.Tensor | None) -> None:
        assert slots is None

    def keep(self, rows: torch.Tensor) -> None:
        pass
