"""Weights of four and eight bits in groups as a CPU's kernels read them. Made when a model is
loaded; a model's file has none."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwater.kernels.quant import int4_layout
from headwater.kernels.quant.block_formats import BLOCK, TILE_ROWS
from headwater.kernels.quant.byte_weights import Int8Weight
from headwater.kernels.quant.fp8_tiles import Fp8Format
from headwater.kernels.quant.group_linear import group_linear
from headwater.kernels.quant.group_tiles import SCALE_DTYPES, GroupFormat, GroupTiles, pack
from headwater.kernels.quant.int4_layout import Int4Weight

from ...config import require
from .linear import Linear

IntWeight = Int4Weight | Int8Weight


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shape of a weight in tiles of any format."""

    format: GroupFormat | Fp8Format
    num_rows: int
    num_groups: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (
            -(-self.num_rows // TILE_ROWS),
            self.num_groups,
            self.format.group_bytes(self.group_size),
        )

    @property
    def num_bytes(self) -> int:
        tiles, groups, size = self.shape
        return tiles * groups * size


@dataclass(frozen=True, slots=True)
class TileLayout(TileShape):
    """Shape and format of a weight in tiles."""

    format: GroupFormat
    is_ordered: bool
    rounds_tokens: bool

    @classmethod
    def of(cls, weight: IntWeight) -> TileLayout | None:
        """Layout of a weight in tiles; None: its groups cannot be tiles."""
        n, k = weight.shape
        num_groups = len(weight.scales)
        size = k // num_groups
        if size % BLOCK or weight.scales.dtype not in SCALE_DTYPES:
            return None
        if weight.groups is not None and set(
            weight.groups.bincount(minlength=num_groups).tolist()
        ) != {size}:
            return None
        is_int4 = isinstance(weight, Int4Weight)
        format = GroupFormat(4 if is_int4 else 8, weight.scales.dtype)
        rounds_tokens = isinstance(weight, Int8Weight) and weight.rounds_tokens
        return cls(format, n, num_groups, size, weight.groups is not None, rounds_tokens)


def write_tiles(weight: IntWeight, layout: TileLayout, memory: torch.Tensor) -> None:
    """Packs a weight into memory uint8 [layout.num_bytes]."""
    values = int4_layout.unpack(weight.words) if isinstance(weight, Int4Weight) else weight.values
    if weight.groups is not None:
        values = values[:, _order(weight.groups)]
    zeros = int4_layout.zero_points(weight) if isinstance(weight, Int4Weight) else weight.zeros
    memory.view(layout.shape).copy_(pack(values, weight.scales, zeros, layout.format.bits))


def _order(groups: torch.Tensor) -> torch.Tensor:
    """Permutation of the inputs that makes each group contiguous."""
    return groups.argsort(stable=True)


class TiledLinear(Linear):
    """A layer whose outputs lie in tiles of sixteen."""

    tiles: Any
    """Tiles of a format, with their number of rows."""

    def outputs(self, rows: range) -> Linear:
        is_whole = rows.start % TILE_ROWS == 0 and len(rows) % TILE_ROWS == 0
        require(is_whole, "outputs of an expert", len(rows), f"multiples of {TILE_ROWS}")
        own = self.tiles.tiles[rows.start // TILE_ROWS : rows.stop // TILE_ROWS]
        part = copy(self)
        part.tiles = replace(self.tiles, tiles=own, num_rows=len(rows))
        part.out_features = len(rows)
        return part


class TileLinear(TiledLinear):
    """Multiplies activations that are rounded to 8 bits in blocks of 32 inputs, or token by
    token."""

    kind = "tiles"

    def __init__(self, weight: IntWeight, layout: TileLayout, memory: torch.Tensor) -> None:
        """memory uint8 [layout.num_bytes], as `write_tiles` fills it"""
        self.tiles = GroupTiles(
            format=layout.format,
            tiles=memory.view(layout.shape),
            num_rows=layout.num_rows,
            group_size=layout.group_size,
            order=None if weight.groups is None else _order(weight.groups),
            rounds_tokens=layout.rounds_tokens,
        )
        self.out_features, self.in_features = weight.shape

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return group_linear(x, self.tiles)
