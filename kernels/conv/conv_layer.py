"""A layer of a short causal convolution between its projections: its weights, and the layout of its
state. Source: Liquid AI, "LFM2 technical report", 2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvUnit:
    """Layout of some channels of a convolution's state at a border of blocks and behind it: inputs
    of the convolution, elements of the model [width − 1 + block_size, num_channels], those of the
    tokens before the border first."""

    num_channels: int
    width: int
    """Tokens that the convolution sees, its own included."""
    block_size: int
    """Tokens between borders."""

    @property
    def num_before(self) -> int:
        """Tokens before a border whose inputs the unit begins with."""
        return self.width - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    unit: ConvUnit
    taps: torch.Tensor
    """float32 [width, H], contiguous, the tap of a token itself last."""

    @property
    def num_units(self) -> int:
        return self.taps.shape[1] // self.unit.num_channels
