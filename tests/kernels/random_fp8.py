"""Random weights of e4m3 numbers, and of MXFP4."""

from __future__ import annotations

import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.byte_weights import Fp8Weight
from headwater.kernels.quant.fp8_tiles import FLOAT4, Fp8Tiles, format_of, pack, pack_float4
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

NONE = 0x7F
"""The bits of a number that is none."""


def random_fp8(
    num_rows: int, num_inputs: int, group_size: int, *, is_shared: bool, seed: int = 0
) -> Fp8Weight:
    """Every number that e4m3 has, the smallest ones among them; scales are those of outputs or,
    `is_shared`, of blocks of sixteen outputs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (num_rows, num_inputs), dtype=torch.uint8, generator=generator)
    bits[(bits & NONE) == NONE] = 0
    scales = torch.rand(num_inputs // group_size, num_rows, generator=generator) * 1e-2 + 1e-4
    if is_shared:
        scales = scales[:, torch.arange(num_rows) // 16 * 16].contiguous()
    return Fp8Weight(values=bits.view(torch.float8_e4m3fn), scales=scales)


def tiles_of(weight: Fp8Weight) -> Fp8Tiles:
    format = format_of(weight)
    group_size = weight.shape[1] // len(weight.scales)
    return Fp8Tiles(
        format=format, tiles=pack(weight, format), num_rows=weight.shape[0], group_size=group_size
    )


def random_float4(num_rows: int, num_inputs: int, seed: int = 0) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(seed)
    pairs = (num_rows, num_inputs // 2)
    of_blocks = (num_inputs // mxfp4.BLOCK, num_rows)
    return Mxfp4Weight(
        words=mxfp4.pack(torch.randint(0, 256, pairs, dtype=torch.uint8, generator=generator)),
        scales=torch.randint(110, 128, of_blocks, dtype=torch.uint8, generator=generator),
    )


def float4_tiles_of(weight: Mxfp4Weight) -> Fp8Tiles:
    return Fp8Tiles(
        format=FLOAT4,
        tiles=pack_float4(weight),
        num_rows=weight.shape[0],
        group_size=mxfp4.BLOCK,
    )
