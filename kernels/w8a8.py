"""x @ weight.T of weights in 8 bits and rows of x rounded to 8 bits, on Hopper: one arithmetic for any number of rows.

A row has one scale and an output has one. The result is (sum * scale of the row) * scale of the output, in float32, and
rounded once. Sums of e4m3 products are those of 128 inputs by the matrix unit, added in float32 one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import hopper_attention, hopper_w8a8_rows
from .byte_weights import ByteWeight, Fp8Weight
from .device import num_multiprocessors
from .hopper_w8a8_gemm import w8a8_gemm
from .token_rounding import round_tokens, round_tokens_twin
from .wide_tiles import TeamTiles

ALIGNMENT = 16
"""Number of inputs and of outputs by which both divide: the copy engine reads rows that begin at multiples of 16 bytes,
and writes such rows."""
INT8_ZERO = 128
"""Zero point of integers without sign that stand for signed ones."""
TEAM_TILES = (
    TeamTiles(128, 192, 5, 0.95, 2, chunk=32),
    TeamTiles(128, 128, 6, 0.93, 2),
    TeamTiles(128, 96, 7, 0.8, 2, chunk=32),
    TeamTiles(128, 64, 8, 0.7, 2),
    TeamTiles(64, 192, 6, 0.76, 1),
    TeamTiles(64, 128, 9, 0.71, 1, chunk=32),
    TeamTiles(64, 96, 9, 0.56, 1, chunk=32),
    TeamTiles(64, 64, 12, 0.43, 1),
)


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
    values, scales = round_tokens(torch.zeros(1, k, dtype=torch.bfloat16, device=device), weight.values.dtype)
    out = torch.empty(1, n, dtype=torch.bfloat16, device=device)
    operands = values, scales, weight.values, weight.scales, out
    for rows in hopper_w8a8_rows.TILES.values():
        hopper_w8a8_rows.w8a8_rows(*operands, rows)
    for tiles in TEAM_TILES:
        w8a8_gemm(*operands, tiles, num_programs=num_multiprocessors(device))


def serves(x: torch.Tensor) -> bool:
    """Whether rows of this type and place are multiplied here."""
    return x.dtype == torch.bfloat16 and hopper_attention.is_hopper(x.device)


def w8a8_linear(x: torch.Tensor, weight: W8A8Weight, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K] times weight [N, K]: [M, N] in bfloat16."""
    values, scales = round_tokens(x, weight.values.dtype, dependent=dependent)
    return w8a8_product(values, scales, weight, dependent=dependent)


def w8a8_product(
    values: torch.Tensor, scales: torch.Tensor, weight: W8A8Weight, *, dependent: bool = False
) -> torch.Tensor:
    """As `w8a8_linear`, of rows that are rounded: values [M, K] of the weight's type times scales float32 [M]."""
    (m, k), n = values.shape, weight.values.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=values.device)
    operands = values, scales, weight.values, weight.scales, out
    if (rows := hopper_w8a8_rows.choose(m)) is not None:
        hopper_w8a8_rows.w8a8_rows(*operands, rows, dependent=dependent)
        return out
    multiprocessors = num_multiprocessors(values.device)
    tiles = min(TEAM_TILES, key=lambda each: each.time(m, n, k, multiprocessors))
    w8a8_gemm(*operands, tiles, num_programs=multiprocessors)
    return out


def w8a8_twin(x: torch.Tensor, weight: W8A8Weight) -> torch.Tensor:
    """As `w8a8_linear`, in plain torch, its sums in float64: of e4m3 products, more exact than the matrix unit's."""
    values, scales = round_tokens_twin(x, weight.values.dtype)
    sums = (values.double() @ weight.values.double().t()).float()
    return (sums * scales[:, None] * weight.scales).to(x.dtype)
