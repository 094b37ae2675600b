"""Weights of e4m3 numbers and of MXFP4 as a CPU's kernels read them. Made when a model is loaded; a
model's file has none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.block_formats import BLOCK
from headwater.kernels.quant.byte_weights import Fp8Weight
from headwater.kernels.quant.fp8_linear import fp8_linear
from headwater.kernels.quant.fp8_tiles import (
    FLOAT4,
    Fp8Format,
    Fp8Tiles,
    format_of,
    pack,
    pack_float4,
)
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from .fp8 import Fp8Linear
from .group_tiles import TiledLinear, TileShape
from .mxfp4 import Mxfp4Linear

FloatWeight = Fp8Weight | Mxfp4Weight
FloatLinear = Fp8Linear | Mxfp4Linear
"""Layers whose weights can be tiles."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types that the kernel computes in."""


@dataclass(frozen=True, slots=True)
class Fp8TileLayout(TileShape):
    """Shape and format of a weight in tiles."""

    format: Fp8Format

    @classmethod
    def of(cls, weight: FloatWeight, dtype: torch.dtype) -> Fp8TileLayout | None:
        """Layout of a weight in tiles; None: its groups cannot be tiles, it holds a NaN, or it is
        expanded to another type."""
        n, k = weight.shape
        if isinstance(weight, Mxfp4Weight):
            layout = cls(FLOAT4, n, len(weight.scales), mxfp4.BLOCK)
            return layout if dtype in DTYPES else None
        num_groups = len(weight.scales)
        size = k // num_groups
        # The bits of a number that is none, without the sign; kernels know no such numbers.
        has_none = bool(((weight.values.view(torch.uint8) & 0x7F) == 0x7F).any())
        if size % BLOCK or dtype not in DTYPES or has_none:
            return None
        return cls(format_of(weight), n, num_groups, size)


def write_fp8_tiles(weight: FloatWeight, layout: Fp8TileLayout, memory: torch.Tensor) -> None:
    """Packs a weight into memory uint8 [layout.num_bytes]."""
    tiles = pack_float4(weight) if isinstance(weight, Mxfp4Weight) else pack(weight, layout.format)
    memory.view(layout.shape).copy_(tiles)


class Fp8TileLinear(TiledLinear):
    """Multiplies activations as they are by the weights that the layer expands to."""

    kind = "fp8 tiles"

    def __init__(self, layout: Fp8TileLayout, memory: torch.Tensor) -> None:
        """memory uint8 [layout.num_bytes], as `write_fp8_tiles` fills it"""
        self.tiles = Fp8Tiles(
            format=layout.format,
            tiles=memory.view(layout.shape),
            num_rows=layout.num_rows,
            group_size=layout.group_size,
        )
        self.out_features, self.in_features = self.tiles.shape

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(x, self.tiles)
