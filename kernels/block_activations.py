"""Activations in 8 bits, for products with packed weights: in plain torch, the specification of the CPU's kernel.

Every 32 inputs have a scale of their own, a 127th of their largest magnitude, or all of a row have one. A block is 48
bytes: 32 numbers, then float32 scale, float32 scale * sum, int32 sum and int32 sum of the first 16 numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .block_formats import BLOCK

ROW_BYTES = 48
"""Size of a block of one row: values, then scale and sums."""
SCALE_AT, SCALED_SUM_AT, SUM_AT, HALF_SUM_AT = 32, 36, 40, 44
MOST = 127
LEAST_MAGNITUDE = 1e-30
"""Largest magnitude below which a block is stored as zeros: the inverse of its scale would not be finite."""


class Activations(NamedTuple):
    """Blocks as numbers; B blocks a row."""

    values: torch.Tensor
    """int8 [T, B, 32]"""
    scale: torch.Tensor
    """float32 [T, B]"""
    scaled_sum: torch.Tensor
    """float32 [T, B]"""
    sum: torch.Tensor
    """int32 [T, B]"""
    half_sum: torch.Tensor
    """int32 [T, B]: sum of the first 16 values."""


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K] to uint8 [T, K / 32, 48]; halves are rounded to even."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    return _rounded(blocks, blocks.abs().amax(-1))


def quantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """As `quantize`, with one scale for all inputs of a row."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    return _rounded(blocks, blocks.abs().amax((1, 2))[:, None].expand(blocks.shape[:2]).contiguous())


def _rounded(blocks: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Rounds blocks float32 [T, B, 32] by magnitude [T, B] to uint8 [T, B, 48]."""
    # A tensor over a tensor: a number over one is multiplied by its reciprocal, which is rounded twice.
    inverse = torch.where(magnitude < LEAST_MAGNITUDE, 0.0, torch.full_like(magnitude, MOST) / magnitude)
    values = (blocks * inverse[..., None]).clamp(-MOST, MOST).round()
    scale, total = magnitude / MOST, values.sum(-1)
    numbers = scale, scale * total, total.int(), values[..., : BLOCK // 2].sum(-1).int()
    parts = [values.to(torch.int8).view(torch.uint8)]
    parts += [number[..., None].contiguous().view(torch.uint8) for number in numbers]
    return torch.cat(parts, dim=-1)


def read(rows: torch.Tensor) -> Activations:
    """Reads rows uint8 [T, B, 48] as numbers."""

    def number(at: int, dtype: torch.dtype) -> torch.Tensor:
        return rows[..., at : at + 4].contiguous().view(dtype).squeeze(-1)

    return Activations(
        values=rows[..., :BLOCK].contiguous().view(torch.int8),
        scale=number(SCALE_AT, torch.float32),
        scaled_sum=number(SCALED_SUM_AT, torch.float32),
        sum=number(SUM_AT, torch.int32),
        half_sum=number(HALF_SUM_AT, torch.int32),
    )
