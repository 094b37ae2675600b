"""`expert_product` with weights of four or eight bits on Hopper: its bits over the expanded
matrices.

Up to `most_rows` rows an expert on average, weights become numbers in registers. More rows are
worth matrices: those of all experts are expanded into scratch memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..gemm import byte_gemm, expanded_mxfp4, hopper_packed_gemm, int4_gemm
from ..gemm.packed_tiles import BLOCK_N, CROWDED_TILES, TILES, RingTiles
from ..gemm.packed_words import ALIGNMENT, PackedWords, RowsOfExperts
from ..norm.silu_mul import gelu_tanh_mul, silu_mul
from ..quant.int4_layout import Int4Weight
from ..quant.mxfp4 import Mxfp4Weight
from .clamped_gate import ExpertBiases, clamped_gate
from .combine import copy_tokens
from .expert_product import expert_product
from .expert_sum import ALL, ExpertPart, sum_of_experts
from .work_list import list_tiles

MOST_ROWS = 128
FLOAT4_MOST_ROWS = 256
FLOAT4_TILES = {
    32: RingTiles(32, 2, 2, 96),
    64: RingTiles(64, 2, 4, None, 2 * BLOCK_N),
    128: RingTiles(64, 2, 4, None, 2 * BLOCK_N),
    None: RingTiles(128, 2, 2, None, 2 * BLOCK_N),
}
"""Tiles of MXFP4 by twice the rows of an expert on average; None: of more. Of the first, three
programs share a multiprocessor. Two teams share rows: on an H200 products of 512 tokens with 32
experts of 2,880 take 390 us, and 489 us with one team for the same tiles (2026-11-29)."""


def fits(weight: PackedWords, num_experts: int) -> bool:
    """Whether weights [E N, K] of all experts are whole in tiles of the kernel."""
    num_weights, _ = weight.shape
    is_cut = num_weights // num_experts % ALIGNMENT == 0
    return is_cut and weight.is_whole


def packed_expert_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedWords,
    down: PackedWords,
    num_experts: int,
    *,
    is_gelu: bool = False,
    biases: ExpertBiases | None = None,
    part: ExpertPart = ALL,
    dependent: bool = False,
) -> torch.Tensor:
    """Arguments as of `expert_product`, with packed gate_up [E 2 I, H] and down [E H, I]."""
    num_pairs = experts.numel()
    if num_pairs > most_rows(gate_up) * num_experts:
        return expert_product(
            x,
            experts,
            weights,
            expanded(gate_up, num_experts, x.dtype),
            expanded(down, num_experts, x.dtype),
            is_gelu=is_gelu,
            biases=biases,
            part=part,
            dependent=dependent,
        )
    tiles = choose(num_pairs, num_experts, gate_up)
    tiles_down = choose(num_pairs, num_experts, down)
    assert tiles.block_m == tiles_down.block_m
    width = down.shape[0] // num_experts
    if not num_pairs:
        return x.new_empty(0, width, dtype=torch.float32 if part.num_leaves else None)
    if len(x) == 1:
        # Each of a token's experts has that token's row: there is nothing to sort.
        rows, places, of_experts = x, None, RowsOfExperts(num_experts, experts, None)
    else:
        work = list_tiles(experts, num_experts, block_m=tiles.block_m, dependent=dependent)
        places = work.places
        rows = x.new_empty(num_pairs, x.shape[1])
        copy_tokens(x, rows, places, dependent=dependent)
        of_experts = RowsOfExperts(num_experts, work.tiles, work.num_tiles)
    products = x.new_empty(num_pairs, gate_up.shape[0] // num_experts)
    multiply = hopper_packed_gemm.hopper_packed_gemm
    multiply(rows, gate_up, products, tiles, of_experts, dependent=dependent)
    if biases is None:
        gated = (gelu_tanh_mul if is_gelu else silu_mul)(products, dependent=dependent)
    else:
        gated = x.new_empty(num_pairs, down.num_inputs)
        clamped_gate(products, experts, biases.gate_up, gated, places, dependent=dependent)
    y = x.new_empty(num_pairs, width)
    known = replace(of_experts, is_known=True)
    multiply(gated, down, y, tiles_down, known, dependent=dependent)
    return sum_of_experts(
        y,
        places,
        experts,
        weights,
        num_experts,
        part,
        biases=None if biases is None else biases.down,
        dependent=dependent,
    )


def choose(num_pairs: int, num_experts: int, weight: PackedWords) -> RingTiles:
    """The smallest tiles that have twice the rows of an expert on average, or the largest. Of
    MXFP4, two teams share many rows."""
    sizes = [rows for bits, rows in TILES if bits == weight.bits]
    most = next((rows for rows in sizes if 2 * num_pairs <= rows * num_experts), None)
    if weight.is_float4 and most in FLOAT4_TILES:
        return FLOAT4_TILES[most]
    most = most or sizes[-1]
    return CROWDED_TILES.get((weight.bits, most)) or TILES[weight.bits, most]


def most_rows(weight: PackedWords) -> int:
    """Rows an expert on average up to which packed weights are multiplied."""
    return FLOAT4_MOST_ROWS if weight.is_float4 else MOST_ROWS


def launch_all_tiles(
    gate_up: PackedWords,
    down: PackedWords,
    num_experts: int,
    num_chosen: int,
    *,
    is_gelu: bool,
    biases: ExpertBiases | None = None,
    part: ExpertPart = ALL,
    early_tokens: int,
) -> None:
    """Like `expert_product.launch_all_tiles`; matrices are expanded once more for the kernels that
    multiply by them."""
    device = gate_up.words.device
    bounds = [rows * num_experts // 2 for each, rows in TILES if each == gate_up.bits]
    bounds += [early_tokens * num_chosen, most_rows(gate_up) * num_experts]
    for num_tokens in sorted({1, *(each // num_chosen + 1 for each in bounds)}):
        experts = torch.zeros(num_tokens, num_chosen, dtype=torch.int32, device=device)
        packed_expert_product(
            torch.zeros(num_tokens, gate_up.num_inputs, dtype=torch.bfloat16, device=device),
            experts,
            torch.zeros_like(experts, dtype=torch.float32),
            gate_up,
            down,
            num_experts,
            is_gelu=is_gelu,
            biases=biases,
            part=part,
            dependent=num_tokens <= early_tokens,
        )


def expanded(weight: PackedWords, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights [E, N, K], each rounded to the dtype once."""
    if weight.is_float4:
        floats = Mxfp4Weight(words=weight.words, scales=weight.scales)
        matrix = expanded_mxfp4.expanded(floats, dtype)
    elif weight.bits == 8:
        matrix = byte_gemm.expanded(weight, dtype)
    else:
        integers = Int4Weight(words=weight.words, scales=weight.scales, zeros=weight.zeros)
        matrix = int4_gemm.expanded(integers, dtype)
    return matrix.view(num_experts, -1, matrix.shape[1])
