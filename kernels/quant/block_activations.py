"""Activations in 8 bits, for products with packed weights: in plain torch, the specification of the
CPU's kernel.

Every 32 inputs have a scale of their own, a 127th of their largest magnitude, or all of a row have
one. A block is 48 bytes: 32 numbers, then float32 scale, float32 scale * sum, int32 sum and an
int32 number: twice the sum of the first 16 numbers, and 1 more for a block that has a rest.

A block with an outlier has a rest, a block of the same form behind all blocks of its row: what
rounding took from its inputs, with a scale of a 254th of its own. Without it, the inputs beside an
outlier would be rounded to a few steps; models have outliers in the same few inputs of nearly all
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .block_formats import BLOCK

ROW_BYTES = 48
"""Size of a block of one row: values, then scale and sums."""
SCALE_AT = 32
SCALED_SUM_AT = 36
SUM_AT = 40
HALF_SUM_AT = 44
MOST = 127
REST_STEPS = 254
"""Steps of a rest's scale in its block's: rounding takes at most half of one of those."""
OUTLIER_RATIO = 5
"""A block has a rest if its largest magnitude is more than so many times the root of its mean
square."""
LEAST_SQUARES = -(-BLOCK * MOST**2 // OUTLIER_RATIO**2)
"""Sum of squares of a block's numbers from which on the block has no rest."""
NUM_PARTS = 2
NUM_PARTS_OF_TOKENS = 1
"""Blocks that a row has room for, for each 32 inputs: one and its rest; and one where all blocks
share a scale."""
LEAST_MAGNITUDE = 1e-30
"""Largest magnitude below which a block is stored as zeros: the inverse of its scale would not be
finite."""


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
    counts: torch.Tensor
    """bool [T, B]: whether the block exists; other entries of the arrays are arbitrary."""


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K] to uint8 [T, 2, K / 32, 48], blocks and their rests; halves are rounded to
    even."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    magnitude = blocks.abs().amax(-1)
    exact = _scaled(blocks, magnitude)
    values = exact.round()
    scale = magnitude / MOST
    has_rest = (magnitude >= LEAST_MAGNITUDE) & (values.square().sum(-1) < LEAST_SQUARES)
    rests = ((exact - values) * REST_STEPS).round()
    return torch.stack(
        [_stored(values, scale, has_rest), _stored(rests, scale / REST_STEPS)], dim=1
    )


def quantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K] to uint8 [T, 1, K / 32, 48], with one scale for all inputs of a row, and no
    rests."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    magnitude = blocks.abs().amax((1, 2))[:, None].expand(blocks.shape[:2]).contiguous()
    return _stored(_scaled(blocks, magnitude).round(), magnitude / MOST)[:, None]


def _scaled(blocks: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Blocks float32 [T, B, 32] by their magnitude [T, B], as numbers -127…127 that are not rounded
    yet."""
    # A tensor over a tensor: a number over one is multiplied by its reciprocal, which is rounded
    # twice.
    inverse = torch.where(
        magnitude < LEAST_MAGNITUDE, 0.0, torch.full_like(magnitude, MOST) / magnitude
    )
    return (blocks * inverse[..., None]).clamp(-MOST, MOST)


def _stored(
    values: torch.Tensor, scale: torch.Tensor, has_rest: torch.Tensor | None = None
) -> torch.Tensor:
    """Whole numbers float32 [T, B, 32] with scale [T, B] as uint8 [T, B, 48]."""
    total = values.sum(-1)
    half = 2 * values[..., : BLOCK // 2].sum(-1).int()
    numbers = scale, scale * total, total.int(), half if has_rest is None else half + has_rest.int()
    parts = [values.to(torch.int8).view(torch.uint8)]
    parts += [number[..., None].contiguous().view(torch.uint8) for number in numbers]
    return torch.cat(parts, dim=-1)


def read(rows: torch.Tensor) -> list[Activations]:
    """Reads rows uint8 [T, P, B, 48] as numbers: blocks, and rests where there are any."""

    def number(at: int, dtype: torch.dtype) -> torch.Tensor:
        return rows[..., at : at + 4].contiguous().view(dtype).squeeze(-1)

    halves = number(HALF_SUM_AT, torch.int32)
    has_rest = (halves[:, 0] & 1).bool()
    parts = (
        rows[..., :BLOCK].contiguous().view(torch.int8),
        number(SCALE_AT, torch.float32),
        number(SCALED_SUM_AT, torch.float32),
        number(SUM_AT, torch.int32),
        halves >> 1,
        torch.stack([torch.ones_like(has_rest), has_rest], dim=1)[:, : rows.shape[1]],
    )
    return [Activations(*(part[:, i] for part in parts)) for i in range(rows.shape[1])]
