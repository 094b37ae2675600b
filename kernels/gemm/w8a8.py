"""x @ weight.T of weights in 8 bits and rows of x rounded to 8 bits, on Hopper: one arithmetic for
any number of rows.

A row has one scale and an output has one. The result is (sum * scale of the row) * scale of the
output, in float32, and rounded once. Sums of e4m3 products are those of 128 inputs by the matrix
unit, added in float32 one after another.

Of weights in blocks, e4m3, a row has a scale for every 128 inputs and a block has one. A sum of 128
inputs times (scale of the row * scale of the block) is added to those before it, each rounded to
float32 once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..launch.device import num_multiprocessors
from ..quant.byte_weights import ByteWeight, Fp8Weight
from ..quant.token_rounding import RoundedTokens, Rounding, Tokens, round_tokens, round_tokens_twin
from . import hopper_w8a8_rows
from .hopper_w8a8_gemm import BLOCK_K, BLOCK_OUTPUTS, w8a8_gemm
from .wide_tiles import TeamTiles

ALIGNMENT = 16
"""Number of inputs and of outputs by which both divide: the copy engine reads rows that begin at
multiples of 16 bytes, and writes such rows."""
INT8_ZERO = 128
"""Zero point of unsigned integers that represent signed ones."""
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
"""Rates are fitted to times on an H200, 100 to 8192 rows, eight shapes (2026-11-23): what they
choose takes 0.6 % more time than the best, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Weight:
    """A weight [N, K] as the kernels read it."""

    values: torch.Tensor
    """float8_e4m3fn or int8 [N, K]"""
    scales: torch.Tensor
    """float32 [N]; of blocks of 64 outputs and 128 inputs [ceil(N / 64), K / 128]"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def rounding(self) -> Rounding:
        """How tokens are rounded before they are multiplied with it."""
        return Rounding(self.values.dtype, BLOCK_K if self.scales.ndim == 2 else 0)

    @property
    def team_tiles(self) -> tuple[TeamTiles, ...]:
        """Tiles for many rows; of blocks, those whose columns begin where a block does."""
        if self.scales.ndim == 1:
            return TEAM_TILES
        return tuple(tiles for tiles in TEAM_TILES if tiles.block_n % BLOCK_OUTPUTS.value == 0)


def fits(weight: ByteWeight, num_experts: int = 1) -> bool:
    """Whether a weight has one scale for each output, or for blocks, and rows that the copy engine
    reads. Of several experts, each has blocks of its own."""
    n, k = weight.shape[0] // num_experts, weight.shape[1]
    if n % ALIGNMENT or k % ALIGNMENT:
        return False
    if isinstance(weight, Fp8Weight):
        is_whole = num_experts == 1 or n % BLOCK_OUTPUTS.value == 0
        return len(weight.scales) == 1 or (is_whole and _is_in_blocks(weight))
    return (
        len(weight.scales) == 1
        and weight.groups is None
        and bool((weight.zeros == INT8_ZERO).all())
    )


def _is_in_blocks(weight: Fp8Weight) -> bool:
    """Whether the weight has a scale for every 64 outputs and 128 inputs."""
    if len(weight.scales) * BLOCK_K != weight.shape[1]:
        return False
    firsts = _of_blocks(weight).repeat_interleave(BLOCK_OUTPUTS.value, dim=1)
    return torch.equal(firsts[:, : weight.shape[0]], weight.scales)


def _of_blocks(weight: Fp8Weight) -> torch.Tensor:
    """Scales of the first output of each block, [K / 128, blocks]."""
    return weight.scales[:, :: BLOCK_OUTPUTS.value]


def signed_in_place(weight: ByteWeight) -> W8A8Weight:
    """The weight, converted in the memory of its values. A weight of 128 inputs has one scale,
    whatever its blocks are."""
    values = weight.values
    scales = weight.scales
    if isinstance(weight, Fp8Weight) and len(scales) > 1:
        return W8A8Weight(values=values, scales=_of_blocks(weight).t().contiguous())
    if not isinstance(weight, Fp8Weight):
        values = values.bitwise_xor_(INT8_ZERO).view(torch.int8)
    return W8A8Weight(values=values, scales=scales[0].float().contiguous())


def launch_all_tiles(weight: W8A8Weight) -> None:
    """Launches every kernel that products with a weight may take."""
    (n, k), device = weight.shape, weight.values.device
    rounded = round_tokens(torch.zeros(1, k, dtype=torch.bfloat16, device=device), weight.rounding)
    out = torch.empty(1, n, dtype=torch.bfloat16, device=device)
    operands = *rounded, weight.values, weight.scales, out
    for rows in hopper_w8a8_rows.tiles_for(n):
        hopper_w8a8_rows.w8a8_rows(*operands, rows)
    for tiles in weight.team_tiles:
        w8a8_gemm(*operands, tiles, num_programs=num_multiprocessors(device))


def w8a8_linear(x: Tokens, weight: W8A8Weight, *, dependent: bool = False) -> torch.Tensor:
    """x [M, K], rounded as the weight says or to be rounded, times weight [N, K]: [M, N] in
    bfloat16."""
    rounded = (
        x if isinstance(x, RoundedTokens) else round_tokens(x, weight.rounding, dependent=dependent)
    )
    (m, k), n, device = rounded.values.shape, weight.shape[0], rounded.values.device
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    operands = *rounded, weight.values, weight.scales, out
    if (rows := hopper_w8a8_rows.choose(m, n)) is not None:
        hopper_w8a8_rows.w8a8_rows(*operands, rows, dependent=dependent)
        return out
    multiprocessors = num_multiprocessors(device)
    tiles = min(weight.team_tiles, key=lambda each: each.time(m, n, k, multiprocessors))
    w8a8_gemm(*operands, tiles, num_programs=multiprocessors)
    return out


def w8a8_twin(x: Tokens, weight: W8A8Weight) -> torch.Tensor:
    """Like `w8a8_linear`, in plain torch, its sums in float64: of e4m3 products, more exact than
    the matrix unit's."""
    rounded = x if isinstance(x, RoundedTokens) else round_tokens_twin(x, weight.rounding)
    if weight.scales.ndim == 2:
        return _twin_of_blocks(rounded, weight)
    sums = (rounded.values.double() @ weight.values.double().t()).float()
    return (sums * rounded.scales[:, None] * weight.scales).bfloat16()


def _twin_of_blocks(rounded: RoundedTokens, weight: W8A8Weight) -> torch.Tensor:
    total = torch.zeros(len(rounded.values), weight.shape[0], device=rounded.values.device)
    of_outputs = weight.scales.repeat_interleave(BLOCK_OUTPUTS.value, dim=0)[: weight.shape[0]]
    parts = (each.double().split(BLOCK_K, dim=1) for each in (rounded.values, weight.values))
    for group, (x, w) in enumerate(zip(*parts, strict=True)):
        scale = rounded.scales[group, :, None] * of_outputs[:, group]
        total = ((x @ w.t()).float().double() * scale + total).float()
    return total.bfloat16()
