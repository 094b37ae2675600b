"""A Mamba-2 layer between its projections: its weights. Source: Dao and Gu, "Transformers are
SSMs", 2024."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .mamba_unit import MambaUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaLayer:
    """Weights are float32 and contiguous. The projection of a token has the gates of all heads, the
    channels of the convolution (values of all heads, the key, the query), and a step of each
    head."""

    unit: MambaUnit
    taps: torch.Tensor
    """[width, channels], the tap of a token itself last."""
    bias: torch.Tensor
    """[channels]"""
    rates: torch.Tensor
    """[heads]: the exponential of `A_log`."""
    step_biases: torch.Tensor
    """[heads]: `dt_bias`."""
    skips: torch.Tensor
    """[heads]: share of a value in its own output, `D`."""

    @property
    def num_heads(self) -> int:
        return len(self.rates)

    @property
    def num_units(self) -> int:
        return self.num_heads // self.unit.num_heads

    @property
    def values_size(self) -> int:
        """Numbers of all heads of a token."""
        return self.num_heads * self.unit.head_dim
