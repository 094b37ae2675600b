"""Weights of e4m3 numbers in groups of inputs, and of MXFP4, in the order in which a CPU's kernels
read them. Knows no file format.

Sixteen rows make a tile. A group's scales of these rows lie before its numbers, one scale where all
sixteen have the same, as weights with scales of blocks or of whole matrices do; then sixteen
numbers, one of each row, input after input. Of MXFP4, scales are bytes of e8m0, and sixteen bytes
have the numbers of two inputs, the first one in the lower half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import byte_weights, mxfp4
from .block_formats import TILE_ROWS
from .byte_weights import Fp8Weight
from .mxfp4 import Mxfp4Weight

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Parameter that a kernel is compiled for."""

    is_shared: bool
    """Whether the sixteen rows of a tile have one scale for a group."""
    is_float4: bool = False
    """Whether the weight is of MXFP4."""

    @property
    def scale_bytes(self) -> int:
        """Number of bytes of a tile's scales of one group."""
        if self.is_float4:
            return TILE_ROWS
        return _SCALE_BYTES if self.is_shared else TILE_ROWS * _SCALE_BYTES

    def group_bytes(self, group_size: int) -> int:
        """Number of bytes of one group of a tile."""
        return self.scale_bytes + TILE_ROWS * group_size // (2 if self.is_float4 else 1)


FLOAT4 = Fp8Format(is_shared=False, is_float4=True)
FP8_FORMATS = (Fp8Format(is_shared=False), Fp8Format(is_shared=True), FLOAT4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tiles:
    """A weight [N, K]: a number times the scale of its output and group of inputs."""

    format: Fp8Format
    tiles: torch.Tensor
    """uint8 [ceil(N / 16), groups, bytes]; rows beyond N are zeros."""
    num_rows: int
    """Number of outputs, N."""
    group_size: int
    """A multiple of 32."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.tiles.shape[1] * self.group_size


def format_of(weight: Fp8Weight) -> Fp8Format:
    """The smallest that holds the weight's scales."""
    of_tiles = weight.scales.split(TILE_ROWS, dim=1)
    return Fp8Format(is_shared=all(bool((each == each[:, :1]).all()) for each in of_tiles))


def pack(weight: Fp8Weight, format: Fp8Format) -> torch.Tensor:
    """Tiles uint8 [ceil(N / 16), groups, bytes] of a weight."""
    num_groups = len(weight.scales)
    padding = -weight.shape[0] % TILE_ROWS
    values = torch.nn.functional.pad(weight.values.view(torch.uint8), (0, 0, 0, padding))
    # [tiles, 16, groups, inputs] -> [tiles, groups, inputs, 16]
    numbers = values.view(-1, TILE_ROWS, num_groups, values.shape[1] // num_groups).permute(
        0, 2, 3, 1
    )
    # [groups, N] -> [tiles, groups, 16]
    scales = (
        torch.nn.functional.pad(weight.scales, (0, padding))
        .view(num_groups, -1, TILE_ROWS)
        .transpose(0, 1)
    )
    scales = scales[:, :, :1] if format.is_shared else scales
    return torch.cat([scales.contiguous().view(torch.uint8), numbers.flatten(2)], dim=2)


def pack_float4(weight: Mxfp4Weight) -> torch.Tensor:
    """Like `pack`, for a weight of MXFP4."""
    n, k = weight.shape
    padding = -n % TILE_ROWS
    numbers = mxfp4.unpack(weight.words, k)
    pairs = torch.nn.functional.pad(numbers[:, 0::2] | numbers[:, 1::2] << 4, (0, 0, 0, padding))
    # [tiles, 16, groups, pairs] -> [tiles, groups, pairs, 16]
    pairs = pairs.view(-1, TILE_ROWS, k // mxfp4.BLOCK, mxfp4.BLOCK // 2).permute(0, 2, 3, 1)
    scales = torch.nn.functional.pad(weight.scales, (0, padding))
    scales = scales.view(len(weight.scales), -1, TILE_ROWS).transpose(0, 1)
    return torch.cat([scales, pairs.flatten(2)], dim=2)


def expanded(weight: Fp8Tiles, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] of tiles in the dtype."""
    if weight.format.is_float4:
        return mxfp4.expand(_read_float4(weight), dtype)
    return byte_weights.expand(read(weight), dtype)


def _read_float4(weight: Fp8Tiles) -> Mxfp4Weight:
    num_rows, _ = weight.shape
    scales = weight.tiles[:, :, :TILE_ROWS].transpose(1, 2).flatten(0, 1)[:num_rows]
    # [tiles, groups, pairs, 16] -> [tiles, 16, groups, pairs]
    pairs = weight.tiles[:, :, TILE_ROWS:].unflatten(2, (-1, TILE_ROWS)).permute(0, 3, 1, 2)
    of_rows = pairs.flatten(0, 1)[:num_rows].flatten(1).contiguous()
    return Mxfp4Weight(words=mxfp4.pack(of_rows), scales=scales.t().contiguous())


def read(weight: Fp8Tiles) -> Fp8Weight:
    """The numbers of tiles, without the rows beyond N."""
    scale_bytes, (num_rows, num_inputs) = weight.format.scale_bytes, weight.shape
    scales = weight.tiles[:, :, :scale_bytes].contiguous().view(torch.float32)
    numbers = weight.tiles[:, :, scale_bytes:].unflatten(2, (weight.group_size, TILE_ROWS))
    values = numbers.permute(0, 3, 1, 2).reshape(-1, num_inputs)[:num_rows].contiguous()
    of_rows = scales.expand(*scales.shape[:2], TILE_ROWS).transpose(1, 2).flatten(0, 1)[:num_rows]
    return Fp8Weight(values=values.view(torch.float8_e4m3fn), scales=of_rows.t().contiguous())
