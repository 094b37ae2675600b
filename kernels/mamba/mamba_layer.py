"""A Mamba-2 layer between its projections: its weights. Source: Dao and Gu, "Transformers are
SSMs", 2024."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .mamba_unit import MambaUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaLayer:
    """Weights are float32 and contiguous. The projection of a token has the gates of all heads, the
    channels of the convolution (values of all heads, keys and queries of all groups), and a step of
    each head."""

    unit: MambaUnit
    num_groups: int
    """Groups of heads, each with a key and a query; a group is one or more units."""
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
    def units_per_group(self) -> int:
        return self.num_units // self.num_groups

    @property
    def values_size(self) -> int:
        """Numbers of all heads of a token."""
        return self.num_heads * self.unit.head_dim

    @property
    def keys_size(self) -> int:
        """Numbers of the keys of all groups of a token."""
        return self.num_groups * self.unit.state_dim
