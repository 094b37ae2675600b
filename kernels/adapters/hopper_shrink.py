"""The sums of pieces that `shrink` makes of few rows, on Hopper: the same bits, sooner.

A program copies a whole piece of A and of the rows into shared memory, so it waits for memory once.
It takes more of that memory than `shrink`, which has room beside a product where this has none.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere

from ..launch.device import num_multiprocessors
from .adapter_tiles import AdapterTiles
from .slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer

BLOCK_K = 128
"""Inputs that are in registers at once."""
RANKS = 16
NUM_WARPS = 2
OF_MULTIPROCESSOR = 3
"""Programs of a multiprocessor; each has 64 KiB of its shared memory."""


def shrink_pieces(
    x: torch.Tensor,
    shrunk: torch.Tensor,
    tiles: AdapterTiles,
    slab: Slab,
    layer: SlabLayer,
) -> None:
    """Writes x [T, K] times each piece of Aᵀ of the adapters of its rows, in float32, to shrunk
    [T, parts, pieces, `MAX_RANK`]."""
    assert x.stride(1) == 1
    num_parts = len(layer.parts)
    num_pieces = triton.cdiv(layer.num_inputs, PIECE)
    num_items = len(tiles.slots) * num_parts * num_pieces
    numbers = slab.of(layer)
    _shrink_pieces[(min(num_items, OF_MULTIPROCESSOR * num_multiprocessors(x.device)),)](
        x,
        shrunk,
        tiles.rows,
        tiles.slots,
        tiles.ranks,
        tiles.count,
        numbers,
        x.stride(0),
        numbers.stride(0),
        layer.num_inputs,
        NUM_PARTS=num_parts,
        NUM_PIECES=num_pieces,
        PIECE=PIECE,
        UNIT=RANK_UNIT,
        MAX_RANK=MAX_RANK,
        TILE=tiles.tile_size,
        BLOCK_K=BLOCK_K,
        BLOCK_R=RANKS,
        num_warps=NUM_WARPS,
    )


@gluon.jit
def _shrink_pieces(
    p_x,
    p_shrunk,
    p_rows,
    p_slots,
    p_ranks,
    p_count,
    p_numbers,
    stride_x,
    stride_rank,
    num_inputs,
    NUM_PARTS: gl.constexpr,
    NUM_PIECES: gl.constexpr,
    PIECE: gl.constexpr,
    UNIT: gl.constexpr,
    MAX_RANK: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_R: gl.constexpr,
):
    """Sums of one piece of the inputs for each tile and projection. To look at the factor first
    would take longer than to compute in vain."""
    WARPS: gl.constexpr = gl.num_warps()
    OF_TILE: gl.constexpr = NUM_PARTS * NUM_PIECES
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = p_x.dtype.element_ty
    x_piece = gl.allocate_shared_memory(dtype, [TILE, PIECE], shared)
    a_piece = gl.allocate_shared_memory(dtype, [BLOCK_R, PIECE], shared)
    o_copied_row = gl.arange(0, TILE, gl.SliceLayout(1, copied))
    o_copied_rank = gl.arange(0, BLOCK_R, gl.SliceLayout(1, copied))
    o_k = gl.arange(0, PIECE, gl.SliceLayout(0, copied))
    o_row = gl.arange(0, TILE, gl.SliceLayout(1, mma))
    o_rank = gl.arange(0, BLOCK_R, gl.SliceLayout(0, mma))
    num_items = gl.load(p_count) * OF_TILE
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        i_tile = item // OF_TILE
        i_part = item % NUM_PARTS
        i_piece = item // NUM_PARTS % NUM_PIECES
        first_k = i_piece * PIECE
        i_slot = gl.load(p_slots + i_tile).to(gl.int64)
        rank = gl.load(p_ranks + i_tile)
        p_tile = p_rows + i_tile * TILE
        b_copied_row = gl.load(p_tile + o_copied_row).to(gl.int64)
        b_row = gl.load(p_tile + o_row).to(gl.int64)
        b_inside = first_k + o_k < num_inputs
        p_a = p_numbers + i_slot * UNIT * stride_rank + i_part * num_inputs + first_k
        p_sums = p_shrunk + ((b_row * NUM_PARTS + i_part) * NUM_PIECES + i_piece) * MAX_RANK
        for r in range(0, rank, BLOCK_R):
            b_rank = r + o_copied_rank
            b_sum = gl.full([TILE, BLOCK_R], 0.0, gl.float32, mma)
            ampere.async_copy.async_copy_global_to_shared(
                a_piece,
                p_a + b_rank[:, None] * stride_rank + o_k[None, :],
                mask=(b_rank < rank)[:, None] & b_inside[None, :],
            )
            ampere.async_copy.async_copy_global_to_shared(
                x_piece,
                p_x + first_k + b_copied_row[:, None] * stride_x + o_k[None, :],
                mask=(b_copied_row >= 0)[:, None] & b_inside[None, :],
            )
            ampere.async_copy.commit_group()
            ampere.async_copy.wait_group(0)
            gl.thread_barrier()
            for k in gl.static_range(0, PIECE, BLOCK_K):
                b_x = x_piece.slice(k, BLOCK_K, dim=1).load(left)
                b_a = a_piece.slice(k, BLOCK_K, dim=1).permute((1, 0)).load(right)
                b_sum = ampere.mma_v2(b_x, b_a, b_sum)
            # All warps have read the pieces before the next ones arrive.
            gl.thread_barrier()
            gl.store(
                p_sums[:, None] + (r + o_rank)[None, :],
                b_sum,
                mask=(b_row >= 0)[:, None] & (r + o_rank < rank)[None, :],
            )
