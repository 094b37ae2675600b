"""`expert_product` of 8 bits by 8 bits on Hopper: weights made for rounded tokens, e4m3 or
integers, by tokens and gated products that are rounded as a dense layer's are. A token's bits are
the same in any batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..gemm import hopper_w8a8_rows
from ..gemm.hopper_w8a8_rows import RowsTiles
from ..gemm.packed_words import RowsOfExperts
from ..gemm.w8a8 import W8A8Weight, w8a8_twin
from ..launch.device import num_multiprocessors
from ..norm.silu_mul import gelu_tanh_mul_twin, rounded_mul, silu_mul_twin
from ..quant.token_rounding import RoundedTokens, round_tokens
from . import hopper_rounded_gemm
from .combine import combine_twin
from .expert_sum import ALL, ExpertPart, sum_of_experts
from .hopper_grouped_gemm import TEAM_ROWS
from .round_rows import round_rows
from .work_list import WorkList, list_tiles

MOST_ROWS = 64
"""Rows an expert on average up to which products stream weights; more take the tiles of teams."""
ALONE = RowsTiles(8, 256, 5)
ROWS_TILES = {
    8: ALONE,
    16: RowsTiles(16, 256, 5),
    32: RowsTiles(32, 256, 4),
    64: RowsTiles(64, 256, 3),
}
"""Tiles by twice the rows of an expert on average: two programs share a multiprocessor."""


def rounded_expert_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: W8A8Weight,
    down: W8A8Weight,
    num_experts: int,
    *,
    is_gelu: bool = False,
    part: ExpertPart = ALL,
    dependent: bool = False,
) -> torch.Tensor:
    """Arguments as of `expert_product`, with gate_up [E 2 I, H] and down [E H, I] in 8 bits."""
    num_pairs = experts.numel()
    width = down.shape[0] // num_experts
    if not num_pairs:
        return x.new_empty(0, width, dtype=torch.float32 if part.num_leaves else None)
    rounding = gate_up.rounding
    tiles = choose(num_pairs, num_experts)
    work = places = None
    num_rows = num_pairs
    if len(x) == 1:
        # Each of a token's experts has that token's row: there is nothing to sort.
        rows = round_tokens(x, rounding, dependent=dependent)
        of_experts = RowsOfExperts(num_experts, experts, None)
    else:
        is_many = tiles is None
        block_m = hopper_rounded_gemm.TILES.block_m if tiles is None else tiles.block_m
        align = TEAM_ROWS if is_many else 1
        work = list_tiles(experts, num_experts, block_m=block_m, align=align, dependent=dependent)
        places, num_rows = work.places, work.num_rows
        rows = round_rows(x, rounding, places, num_rows, dependent=dependent)
        of_experts = RowsOfExperts(num_experts, work.tiles, work.num_tiles)
    products = x.new_empty(num_rows, gate_up.shape[0] // num_experts)
    _multiply(rows, gate_up, products, tiles, of_experts, work, dependent=dependent)
    gated = rounded_mul(products, down.rounding, is_gelu=is_gelu, dependent=dependent)
    y = x.new_empty(num_rows, width)
    known = replace(of_experts, is_known=True)
    _multiply(gated, down, y, tiles, known, work, dependent=dependent)
    return sum_of_experts(
        y, places, experts, weights, num_experts, part, biases=None, dependent=dependent
    )


def _multiply(
    rows: RoundedTokens,
    weight: W8A8Weight,
    out: torch.Tensor,
    tiles: RowsTiles | None,
    experts: RowsOfExperts,
    work: WorkList | None,
    *,
    dependent: bool,
) -> None:
    """Writes products of rows; without tiles, by teams."""
    if tiles is None:
        assert work is not None
        programs = num_multiprocessors(out.device)
        hopper_rounded_gemm.rounded_gemm(rows, weight, out, work, num_programs=programs)
        return
    operands = *rows, weight.values, weight.scales, out
    hopper_w8a8_rows.w8a8_rows(*operands, tiles, experts, dependent=dependent)


def choose(num_pairs: int, num_experts: int) -> RowsTiles | None:
    """The smallest tiles that have twice the rows of an expert on average, or the largest; None:
    there are more than `MOST_ROWS`."""
    if num_pairs > MOST_ROWS * num_experts:
        return None
    sizes = (size for size in ROWS_TILES if 2 * num_pairs <= size * num_experts)
    return ROWS_TILES[next(sizes, max(ROWS_TILES))]


def launch_all_tiles(
    gate_up: W8A8Weight,
    down: W8A8Weight,
    num_experts: int,
    num_chosen: int,
    *,
    is_gelu: bool,
    part: ExpertPart = ALL,
    early_tokens: int,
) -> None:
    """Like `expert_product.launch_all_tiles`."""
    device = gate_up.values.device
    bounds = [size * num_experts // 2 for size in ROWS_TILES]
    bounds += [early_tokens * num_chosen, MOST_ROWS * num_experts]
    for num_tokens in sorted({1, *(each // num_chosen + 1 for each in bounds)}):
        experts = torch.zeros(num_tokens, num_chosen, dtype=torch.int32, device=device)
        rounded_expert_product(
            torch.zeros(num_tokens, gate_up.shape[1], dtype=torch.bfloat16, device=device),
            experts,
            torch.zeros_like(experts, dtype=torch.float32),
            gate_up,
            down,
            num_experts,
            is_gelu=is_gelu,
            part=part,
            dependent=num_tokens <= early_tokens,
        )


def rounded_expert_product_twin(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: W8A8Weight,
    down: W8A8Weight,
    num_experts: int,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """`rounded_expert_product` in plain torch; the sum is not rounded."""
    gate = gelu_tanh_mul_twin if is_gelu else silu_mul_twin
    y = x.new_zeros(*experts.shape, down.shape[0] // num_experts)
    for i in range(num_experts):
        of_expert = experts == i
        products = w8a8_twin(x[of_expert.nonzero()[:, 0]], of_one(gate_up, i, num_experts))
        gated = gate(products).to(x.dtype)
        y[of_expert] = w8a8_twin(gated, of_one(down, i, num_experts))
    return combine_twin(y, weights)


def of_one(weight: W8A8Weight, i: int, num_experts: int) -> W8A8Weight:
    """The weight [N, K] of expert i of [E N, K]."""
    values, scales = (each.chunk(num_experts)[i] for each in (weight.values, weight.scales))
    return W8A8Weight(values=values, scales=scales)
