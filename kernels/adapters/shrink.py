"""x Aᵀ by each row's adapter, on a GPU: the first factor of `adapter_product`.

A tile of rows with one adapter is multiplied at a time. Sums are made in the same order by the same
instructions whatever the number of rows, so a row's bits depend on its adapter alone: of few rows,
each piece of the inputs has a program of its own, and `expand` adds the sums of pieces in their
order; of many rows, one program adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.device import num_multiprocessors
from .adapter_tiles import AdapterTiles
from .slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer

MAX_PARTS = 3
"""Projections that are joined in one layer."""
RANKS = 16
"""Ranks that are multiplied together; the matrix unit takes no fewer."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shape of a launch."""

    inputs: int
    """Inputs that are multiplied at once."""
    num_stages: int
    """Blocks of A in shared memory."""
    num_warps: int
    of_multiprocessor: int
    """Programs of a multiprocessor."""


FEW_BLOCKS = Blocks(128, 5, 2, 8)
MANY_BLOCKS = Blocks(128, 3, 4, 8)
_INTERPRETED_PROGRAMS = 3


def shrunk_like(x: torch.Tensor, tiles: AdapterTiles, layer: SlabLayer) -> torch.Tensor:
    """Memory for what `shrink` makes of x [T, K]: sums of pieces in float32 for few rows, else
    rounded sums."""
    num_parts = len(layer.parts)
    if not tiles.is_few:
        return x.new_empty(len(x), num_parts, MAX_RANK)
    num_pieces = triton.cdiv(layer.num_inputs, PIECE)
    return x.new_empty(len(x), num_parts, num_pieces, MAX_RANK, dtype=torch.float32)


def shrink(
    x: torch.Tensor,
    shrunk: torch.Tensor,
    tiles: AdapterTiles,
    slab: Slab,
    layer: SlabLayer,
) -> None:
    """Writes x [T, K] times Aᵀ of the adapters of its rows, as `expand` reads it."""
    num_parts = len(layer.parts)
    assert num_parts <= MAX_PARTS
    assert x.stride(1) == 1
    num_pieces = triton.cdiv(layer.num_inputs, PIECE)
    is_few = tiles.is_few
    blocks = FEW_BLOCKS if is_few else MANY_BLOCKS
    num_items = len(tiles.slots) * num_parts * (num_pieces if is_few else 1)
    numbers = slab.of(layer)
    _shrink[(num_programs(x.device, num_items, blocks.of_multiprocessor),)](
        x,
        shrunk,
        tiles.rows,
        tiles.slots,
        tiles.ranks,
        tiles.count,
        numbers,
        slab.factors,
        x.stride(0),
        numbers.stride(0),
        slab.factors.shape[1],
        layer.column,
        layer.num_inputs,
        NUM_PARTS=num_parts,
        NUM_PIECES=num_pieces,
        PIECE=PIECE,
        IS_FEW=is_few,
        UNIT=RANK_UNIT,
        MAX_RANK=MAX_RANK,
        TILE=tiles.tile_size,
        BLOCK_K=blocks.inputs,
        BLOCK_R=RANKS,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def num_programs(device: torch.device, num_items: int, of_multiprocessor: int) -> int:
    """Number of programs for at most `num_items` items."""
    if device.type != "cuda":
        return min(num_items, _INTERPRETED_PROGRAMS)
    return min(num_items, of_multiprocessor * num_multiprocessors(device))


@triton.jit
def _sum_of_piece(
    p_x,
    p_a,
    b_acc,
    o_k,
    num_inputs,
    b_is_row,
    b_is_rank,
    PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds a piece of x [TILE, K] times A [BLOCK_R, K], transposed."""
    for k in range(0, PIECE, BLOCK_K):
        b_inside = k + o_k < num_inputs
        b_x = tl.load(p_x + k, mask=b_is_row[:, None] & b_inside[None, :], other=0.0)
        b_a = tl.load(p_a + k, mask=b_is_rank[:, None] & b_inside[None, :], other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_a), b_acc, input_precision="ieee")
    return b_acc


@triton.jit(do_not_specialize=["column"])
def _shrink(
    p_x,
    p_shrunk,
    p_rows,
    p_slots,
    p_ranks,
    p_count,
    p_numbers,
    p_factors,
    stride_x,
    stride_rank,
    stride_factors,
    column,
    num_inputs,
    NUM_PARTS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    IS_FEW: tl.constexpr,
    UNIT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    OF_TILE: tl.constexpr = NUM_PARTS * NUM_PIECES if IS_FEW else NUM_PARTS
    num_items = tl.load(p_count) * OF_TILE
    o_tile = tl.arange(0, TILE)
    o_k = tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i_tile = item // OF_TILE
        i_part = item % NUM_PARTS
        i_slot = tl.load(p_slots + i_tile).to(tl.int64)
        rank = tl.load(p_ranks + i_tile)
        b_row = tl.load(p_rows + i_tile * TILE + o_tile).to(tl.int64)
        b_is_row = b_row >= 0
        p_x_rows = p_x + b_row[:, None] * stride_x + o_k[None, :]
        # Of few rows, to look at the factor first would take longer than to compute in vain.
        if not IS_FEW:
            factor = tl.load(p_factors + i_slot * stride_factors + column + i_part)
            rank = tl.where(factor == 0.0, 0, rank)
        for r in range(0, rank, BLOCK_R):
            o_rank = r + tl.arange(0, BLOCK_R)
            b_is_rank = o_rank < rank
            p_a = p_numbers + (i_slot * UNIT + o_rank)[:, None] * stride_rank
            p_a += i_part * num_inputs + o_k[None, :]
            if IS_FEW:
                i_piece = item // NUM_PARTS % NUM_PIECES
                begin = i_piece * PIECE
                b_zero = tl.zeros((TILE, BLOCK_R), tl.float32)
                b_sum = _sum_of_piece(
                    p_x_rows + begin,
                    p_a + begin,
                    b_zero,
                    begin + o_k,
                    num_inputs,
                    b_is_row,
                    b_is_rank,
                    PIECE,
                    BLOCK_K,
                )
                i_out = (b_row * NUM_PARTS + i_part) * NUM_PIECES + i_piece
            else:
                b_sum = tl.zeros((TILE, BLOCK_R), tl.float32)
                for i_piece in range(NUM_PIECES):
                    begin = i_piece * PIECE
                    b_zero = tl.zeros((TILE, BLOCK_R), tl.float32)
                    b_sum += _sum_of_piece(
                        p_x_rows + begin,
                        p_a + begin,
                        b_zero,
                        begin + o_k,
                        num_inputs,
                        b_is_row,
                        b_is_rank,
                        PIECE,
                        BLOCK_K,
                    )
                i_out = b_row * NUM_PARTS + i_part
            tl.store(
                p_shrunk + i_out[:, None] * MAX_RANK + o_rank[None, :],
                b_sum.to(p_shrunk.dtype.element_ty),
                mask=b_is_row[:, None] & b_is_rank[None, :],
            )
