"""Arguments of a gated delta net's kernels: where its heads lie in the projections, and its
weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .delta_unit import CONV_WIDTH, DeltaUnit


class Place(NamedTuple):
    """Numbers of one kind in a token's projection."""

    first: int
    """Index of the first key head's."""
    stride: int
    """Distance between the first numbers of two key heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlaces:
    """Offsets of a key head's numbers: query, key, values and output gates (z) in the wide
    projection, decays (a) and shares (b) in the narrow one. Those of its value heads lie
    together."""

    query: Place
    key: Place
    value: Place
    z: Place
    decay: Place
    share: Place

    @classmethod
    def by_kind(cls, num_heads: int, unit: DeltaUnit) -> HeadPlaces:
        """All heads' queries, then keys, values and gates; shares before decays."""
        keys = num_heads * unit.key_dim
        width = unit.num_values * unit.value_dim
        return cls(
            query=Place(0, unit.key_dim),
            key=Place(keys, unit.key_dim),
            value=Place(2 * keys, width),
            z=Place(2 * keys + num_heads * width, width),
            share=Place(0, unit.num_values),
            decay=Place(num_heads * unit.num_values, unit.num_values),
        )

    @classmethod
    def by_head(cls, unit: DeltaUnit) -> HeadPlaces:
        """One key head behind the other: query, key, values and gates; shares before decays."""
        width = unit.num_values * unit.value_dim
        whole = 2 * unit.key_dim + 2 * width
        return cls(
            query=Place(0, whole),
            key=Place(unit.key_dim, whole),
            value=Place(2 * unit.key_dim, whole),
            z=Place(2 * unit.key_dim + width, whole),
            share=Place(0, 2 * unit.num_values),
            decay=Place(unit.num_values, 2 * unit.num_values),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """A layer between its projections; weights are float32 and contiguous."""

    unit: DeltaUnit
    places: HeadPlaces
    conv: torch.Tensor
    """[key heads, CONV_WIDTH, channels of a unit], the tap of a token itself last."""
    rates: torch.Tensor
    """[value heads]: the exponential of `A_log`."""
    biases: torch.Tensor
    """[value heads]: `dt_bias`."""
    norm: torch.Tensor
    """[value_dim]"""
    eps: float

    @property
    def num_heads(self) -> int:
        """Key heads."""
        return len(self.conv)

    @property
    def values_size(self) -> int:
        """Numbers of all value heads of a token."""
        return self.num_heads * self.unit.num_values * self.unit.value_dim


def conv_by_unit(conv: torch.Tensor, num_heads: int, unit: DeltaUnit) -> torch.Tensor:
    """conv [channels, CONV_WIDTH], all heads' queries, then keys and values → that of
    `DeltaLayer`."""
    keys = num_heads * unit.key_dim
    parts = torch.split(conv.float(), [keys, keys, len(conv) - 2 * keys])
    heads = torch.cat([part.view(num_heads, -1, CONV_WIDTH) for part in parts], dim=1)
    return heads.transpose(1, 2).contiguous()
