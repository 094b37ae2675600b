"""y += (x Aᵀ) Bᵀ * factor by each row's adapter, on a GPU. Twin: `adapter_product`.

A tile of rows with one adapter is multiplied at a time. Sums are made in the same order by the same
instructions whatever the number of rows, so a row's bits depend on its adapter alone: of few rows,
each piece of the inputs has a program of its own, and the sums of pieces are added in their order
where they are read; of many rows, one program adds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    ask_early,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from ..launch.device import num_multiprocessors
from .adapter_tiles import AdapterTiles
from .slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer

MAX_PARTS = 3
"""Projections that are joined in one layer."""
_RANKS = 16
"""Ranks that are multiplied together; the matrix unit takes no fewer."""
_FEW_INPUTS = 256
_MANY_INPUTS = 128
_OUTPUTS = 256
_INTERPRETED_PROGRAMS = 3
LINE = tl.constexpr(64)
"""Numbers of 16 bits in a line of the second-level cache."""


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
    num_items = len(tiles.slots) * num_parts * (num_pieces if is_few else 1)
    numbers = slab.of(layer)
    _shrink[(_programs(x.device, num_items),)](
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
        BLOCK_K=_FEW_INPUTS if is_few else _MANY_INPUTS,
        BLOCK_R=_RANKS,
        num_warps=4,
        num_stages=3,
    )


def expand(
    shrunk: torch.Tensor,
    y: torch.Tensor,
    tiles: AdapterTiles,
    slab: Slab,
    layer: SlabLayer,
    *,
    dependent: bool = False,
) -> None:
    """Adds what `shrink` made, times Bᵀ and the factor, to y [T, N] in place. `dependent`: it
    starts while the product ends, and asks for its first factors meanwhile; tiles are there, since
    what makes them lets nothing start before its end."""
    assert y.stride(1) == 1
    sizes = (*layer.parts, 0, 0)[:MAX_PARTS]
    num_blocks = sum(triton.cdiv(size, _OUTPUTS) for size in sizes)
    numbers = slab.of(layer)
    _expand[(_programs(y.device, len(tiles.slots) * num_blocks),)](
        y,
        shrunk,
        tiles.rows,
        tiles.slots,
        tiles.ranks,
        tiles.count,
        numbers,
        slab.factors,
        y.stride(0),
        numbers.stride(0),
        slab.factors.shape[1],
        layer.first_b,
        layer.column,
        *sizes,
        NUM_PARTS=len(layer.parts),
        NUM_PIECES=triton.cdiv(layer.num_inputs, PIECE),
        IS_FEW=tiles.is_few,
        UNIT=RANK_UNIT,
        MAX_RANK=MAX_RANK,
        TILE=tiles.tile_size,
        BLOCK_N=_OUTPUTS,
        BLOCK_R=_RANKS,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )


def add_adapters(
    x: torch.Tensor, y: torch.Tensor, tiles: AdapterTiles, slab: Slab, layer: SlabLayer
) -> None:
    """Adds to y [T, N] in place what x [T, K] makes with the adapters of its rows."""
    shrunk = shrunk_like(x, tiles, layer)
    shrink(x, shrunk, tiles, slab, layer)
    expand(shrunk, y, tiles, slab, layer)


def _programs(device: torch.device, num_items: int) -> int:
    """Number of programs that share the items, of which there are at most so many."""
    if device.type != "cuda":
        return min(num_items, _INTERPRETED_PROGRAMS)
    return min(num_items, 8 * num_multiprocessors(device))


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


@triton.jit
def _shrunk_ranks(
    p_shrunk,
    i_in,
    o_rank,
    inside,
    dtype: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    IS_FEW: tl.constexpr,
    MAX_RANK: tl.constexpr,
):
    """The rounded sums [TILE, BLOCK_R] of some ranks; pieces are added in their order."""
    if IS_FEW:
        b_sum = tl.zeros(inside.shape, tl.float32)
        for i_piece in tl.static_range(NUM_PIECES):
            i_sum = i_in * NUM_PIECES + i_piece
            p_sum = p_shrunk + i_sum[:, None] * MAX_RANK + o_rank[None, :]
            b_sum += tl.load(p_sum, mask=inside, other=0.0)
        b_shrunk = b_sum.to(dtype)
    else:
        p_in = p_shrunk + i_in[:, None] * MAX_RANK + o_rank[None, :]
        b_shrunk = tl.load(p_in, mask=inside, other=0.0)
    return b_shrunk


@triton.jit
def _place_of_block(i_block, size_0, size_1, size_2, BLOCK_N: tl.constexpr):
    """The projection of a block of outputs, the block's first output in it, the outputs of
    projections before it, and its own number of outputs."""
    blocks_0 = tl.cdiv(size_0, BLOCK_N)
    blocks_1 = tl.cdiv(size_1, BLOCK_N)
    is_1 = (i_block >= blocks_0) & (i_block < blocks_0 + blocks_1)
    is_2 = i_block >= blocks_0 + blocks_1
    i_part = is_1.to(tl.int32) + 2 * is_2.to(tl.int32)
    blocks_before = tl.where(is_2, blocks_0 + blocks_1, tl.where(is_1, blocks_0, 0))
    size_before = tl.where(is_2, size_0 + size_1, tl.where(is_1, size_0, 0))
    size = tl.where(is_2, size_2, tl.where(is_1, size_1, size_0))
    return i_part, (i_block - blocks_before) * BLOCK_N, size_before, size


@triton.jit(do_not_specialize=["column"])
def _expand(
    p_y,
    p_shrunk,
    p_rows,
    p_slots,
    p_ranks,
    p_count,
    p_numbers,
    p_factors,
    stride_y,
    stride_rank,
    stride_factors,
    first_b,
    column,
    size_0,
    size_1,
    size_2,
    NUM_PARTS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    IS_FEW: tl.constexpr,
    UNIT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Slot, rank and rows of the next item are loaded while this one is computed: these loads wait
    for one another."""
    num_blocks = tl.cdiv(size_0, BLOCK_N) + tl.cdiv(size_1, BLOCK_N) + tl.cdiv(size_2, BLOCK_N)
    release_dependents(DEPENDENT)
    num_items = tl.load(p_count) * num_blocks
    o_tile = tl.arange(0, TILE)
    first = tl.program_id(0)
    is_item = first < num_items
    i_tile = first // num_blocks
    next_slot = tl.load(p_slots + i_tile, mask=is_item, other=0)
    next_rank = tl.load(p_ranks + i_tile, mask=is_item, other=0)
    b_next_row = tl.load(p_rows + i_tile * TILE + o_tile, mask=is_item, other=-1)
    if DEPENDENT and is_item:
        _, first_n, size_before, size = _place_of_block(
            first % num_blocks, size_0, size_1, size_2, BLOCK_N
        )
        i_rank = next_slot.to(tl.int64) * UNIT + tl.minimum(tl.arange(0, BLOCK_R), next_rank - 1)
        o_line = tl.minimum(first_n + tl.arange(0, BLOCK_N // LINE) * LINE, size - 1)
        p_first = p_numbers + first_b + size_before
        ask_early(p_first + i_rank[:, None] * stride_rank + o_line[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)
    for item in range(first, num_items, tl.num_programs(0)):
        i_slot = next_slot.to(tl.int64)
        rank = next_rank
        b_row = b_next_row.to(tl.int64)
        i_part, first_n, size_before, size = _place_of_block(
            item % num_blocks, size_0, size_1, size_2, BLOCK_N
        )
        o_n = first_n + tl.arange(0, BLOCK_N)
        b_inside = o_n < size
        b_is_row = b_row >= 0
        factor = tl.load(p_factors + i_slot * stride_factors + column + i_part)
        p_out = p_y + b_row[:, None] * stride_y + size_before + o_n[None, :]
        b_is_out = b_is_row[:, None] & b_inside[None, :]
        b_y = tl.load(p_out, mask=b_is_out, other=0.0)
        next_item = item + tl.num_programs(0)
        is_next = next_item < num_items
        i_tile = next_item // num_blocks
        next_slot = tl.load(p_slots + i_tile, mask=is_next, other=0)
        next_rank = tl.load(p_ranks + i_tile, mask=is_next, other=0)
        b_next_row = tl.load(p_rows + i_tile * TILE + o_tile, mask=is_next, other=-1)
        b_delta = tl.zeros((TILE, BLOCK_N), tl.float32)
        for r in range(0, rank, BLOCK_R):
            o_rank = r + tl.arange(0, BLOCK_R)
            b_is_rank = o_rank < rank
            p_b = p_numbers + (i_slot * UNIT + o_rank)[:, None] * stride_rank
            p_b += first_b + size_before + o_n[None, :]
            b_b = tl.load(p_b, mask=b_is_rank[:, None] & b_inside[None, :], other=0.0)
            b_shrunk = _shrunk_ranks(
                p_shrunk,
                b_row * NUM_PARTS + i_part,
                o_rank,
                b_is_row[:, None] & b_is_rank[None, :],
                p_y.dtype.element_ty,
                NUM_PIECES,
                IS_FEW,
                MAX_RANK,
            )
            b_delta = tl.dot(b_shrunk, b_b, b_delta, input_precision="ieee")
        b_sum = b_y.to(tl.float32) + b_delta * factor
        tl.store(
            p_out, b_sum.to(p_y.dtype.element_ty), mask=tl.where(factor != 0.0, b_is_out, False)
        )
