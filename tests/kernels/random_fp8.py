"""Random weights of e4m3 numbers."""

from __future__ import annotations

import torch

from headwater.kernels.quant.byte_weights import Fp8Weight
from headwater.kernels.quant.fp8_tiles import Fp8Tiles, format_of, pack

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
