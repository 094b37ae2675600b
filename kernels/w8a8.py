"""x @ weight.T of weights in 8 bits and rows of x rounded to 8 bits, on Hopper: one arithmetic for any number of rows.

A row has one scale and an output has one. The result is (sum * scale of the row) * scale of the output, in float32, and
rounded once. Sums of e4m3 products are those of 128 inputs by the matrix unit, added in float32 one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import hopper_w8a8_rows
from .byte_weights import ByteWeight, Fp8Weight
from .device import num_multiprocessors
from .hopper_w8a8_gemm import w8a8_gemm
from .token_rounding import RoundedTokens, Tokens, round_tokens, round_tokens_twin
from .wide_tiles import TeamTiles

ALIGNMENT = 16
"""Number of inputs and of outputs by which both divide: the copy engine reads rows that begin at multiples of 16 bytes,
and writes such rows."""
INT8_ZERO = 128
"""Zero point of integers without sign that stand for signed ones."""
TEAM_TILES = (
    TeamTiles(128, 192, 5, 1.0, 2, chunk=32),
    TeamTiles(128, 128, 6, 0.886, 2),
    TeamTiles(128, 96, 7, 0.692, 2, chunk=32),
    TeamTiles(128, 64, 8, 0.605, 2),
    TeamTiles(64, 192, 6, 0.654, 1),
    TeamTiles(64, 128, 9, 0.522, 1, chunk=32),
    TeamTiles(64, 96, 9, 0.452, 1, chunk=32),
    TeamTiles(64, 64, 12, 0.366, 1),
)
"""Rates are fitted to times on an H200, 100 to 8192 rows, eight shapes (2026-11-23): what they choose takes 0.6 % more
time than the best, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Weight:
    """A weight [N, K] as the kernels read it."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [N, K]"""
    scales: torch.Tensor
    """float32 [N]"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


def fits(weight: ByteWeight) -> bool:
    """Whether a weight has one scale for each output, and rows that the copy engine reads."""
    n, k = weight.shape
    if len(weight.scales) != 1 or n % ALIGNMENT or k % ALIGNMENT:
        return False
    return isinstance(weight, Fp8Weight) or (weight.groups is None and bool((weight.zeros == INT8_ZERO).all()))


def signed_in_place(weight: ByteWeight) -> W8A8Weight:
    """The weight, in the memory of its values."""
    values = weight.values
    if not isinstance(weight, Fp8Weight):
        values = values.bitwise_xor_(INT8_ZERO).view(torch.int8)
    return W8A8Weight(values=values, scales=weight.scales[0].float().contiguous())


def launch_all_tiles(weight: W8A8Weight) -> None:
    """Launches every kernel that products with a weight may take."""
    (n, k), device = weight.shape, weight.values.device
    rounded = round_tokens(torch.zeros(1, k, dtype=torch.bfloat16, device=device), weight.values.dtype)
    out = torch.empty(1, n, dtype=torch.bfloat16, device=device)
    operands = *rounded, weight.values, weight.scales, out
    for rows in hopper_w8a8_rows.tiles_for(n):
        hopper_w8a8_rows.w8a8_rows(*operands, rows)
    for tiles in TEAM_TILES:
        w8a8_gemm(*operands, tiles, num_programs=num_multiprocessors(device))


def w8a8_linear(x: Tokens, weight: W8A8Weight, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K], rounded to the weight's type or to be rounded, times weight [N, K]: [M, N] in bfloat16."""
    rounded = x if isinstance(x, RoundedTokens) else round_tokens(x, weight.values.dtype, dependent=dependent)
    (m, k), n, device = rounded.values.shape, weight.shape[0], rounded.values.device
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    operands = *rounded, weight.values, weight.scales, out
    if (rows := hopper_w8a8_rows.choose(m, n)) is not None:
        hopper_w8a8_rows.w8a8_rows(*operands, rows, dependent=dependent)
        return out
    multiprocessors = num_multiprocessors(device)
    tiles = min(TEAM_TILES, key=lambda each: each.time(m, n, k, multiprocessors))
    w8a8_gemm(*operands, tiles, num_programs=multiprocessors)
    return out


def w8a8_twin(x: Tokens, weight: W8A8Weight) -> torch.Tensor:
    """As `w8a8_linear`, in plain torch, its sums in float64: of e4m3 products, more exact than the matrix unit's."""
    rounded = x if isinstance(x, RoundedTokens) else round_tokens_twin(x, weight.values.dtype)
    sums = (rounded.values.double() @ weight.values.double().t()).float()
    return (sums * rounded.scales[:, None] * weight.scales).bfloat16()
