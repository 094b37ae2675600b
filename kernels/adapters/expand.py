"""y += shrunk Bᵀ * factor by each row's adapter, on a GPU: the second factor of `adapter_product`;
and the gate behind it.

A program has a stretch of the blocks of outputs of all tiles, and copies blocks of B while it
multiplies others. A sum is made of the same products in the same order in every tile, so a row's
bits depend on its adapter alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    ask_early,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from ..norm.silu_mul import gated, gelu_gated
from .adapter_tiles import AdapterTiles
from .shrink import MAX_PARTS, RANKS, num_programs
from .slab import MAX_RANK, PIECE, RANK_UNIT, Slab, SlabLayer

LINE = tl.constexpr(64)
"""Numbers of 16 bits in a line of the second-level cache."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shape of a launch."""

    outputs: int
    """Outputs of a projection that are computed at once."""
    num_stages: int
    """Blocks of B in shared memory."""
    num_warps: int
    of_multiprocessor: int
    """Programs of a multiprocessor."""


FEW_BLOCKS = Blocks(128, 4, 4, 4)
MANY_BLOCKS = Blocks(128, 3, 4, 4)
FEW_GATED_BLOCKS = Blocks(64, 4, 4, 4)
MANY_GATED_BLOCKS = Blocks(64, 3, 4, 4)


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
    blocks = FEW_BLOCKS if tiles.is_few else MANY_BLOCKS
    num_items = len(tiles.slots) * sum(triton.cdiv(size, blocks.outputs) for size in sizes)
    _expand[(num_programs(y.device, num_items, blocks.of_multiprocessor),)](
        y,
        shrunk,
        *_of_tiles(tiles, slab, layer),
        y.stride(0),
        *sizes,
        NUM_PARTS=len(layer.parts),
        **_constants(tiles, layer, blocks, dependent=dependent),
    )


def expand_gated(
    shrunk: torch.Tensor,
    y: torch.Tensor,
    out: torch.Tensor,
    tiles: AdapterTiles,
    slab: Slab,
    layer: SlabLayer,
    *,
    is_gelu: bool,
    dependent: bool = False,
) -> None:
    """Writes what `silu_mul`, or `gelu_tanh_mul`, makes of y [T, 2 I] after `expand` to out [T, I],
    also for rows without an adapter; y stays as it is. `dependent` as in `expand`."""
    width = out.shape[1]
    assert layer.parts == (width, width)
    assert y.stride(1) == out.stride(1) == 1
    blocks = FEW_GATED_BLOCKS if tiles.is_few else MANY_GATED_BLOCKS
    num_items = len(tiles.slots) * triton.cdiv(width, blocks.outputs)
    _expand_gated[(num_programs(y.device, num_items, blocks.of_multiprocessor),)](
        y,
        shrunk,
        *_of_tiles(tiles, slab, layer),
        y.stride(0),
        out,
        out.stride(0),
        width,
        GELU=is_gelu,
        **_constants(tiles, layer, blocks, dependent=dependent),
    )


def _of_tiles(tiles: AdapterTiles, slab: Slab, layer: SlabLayer) -> tuple[torch.Tensor | int, ...]:
    numbers = slab.of(layer)
    return (
        tiles.rows,
        tiles.slots,
        tiles.ranks,
        tiles.count,
        numbers,
        slab.factors,
        numbers.stride(0),
        slab.factors.shape[1],
        layer.first_b,
        layer.column,
    )


def _constants(
    tiles: AdapterTiles, layer: SlabLayer, blocks: Blocks, *, dependent: bool
) -> dict[str, int | bool]:
    return {
        "NUM_PIECES": triton.cdiv(layer.num_inputs, PIECE),
        "IS_FEW": tiles.is_few,
        "UNIT": RANK_UNIT,
        "MAX_RANK": MAX_RANK,
        "TILE": tiles.tile_size,
        "BLOCK_N": blocks.outputs,
        "BLOCK_R": RANKS,
        "STAGES": blocks.num_stages,
        "DEPENDENT": dependent,
        "num_warps": blocks.num_warps,
    } | launch_options(dependent)


@triton.jit
def _shrunk_ranks(p_shrunk, i_in, b_is_row, o_rank, rank, dtype: tl.constexpr, shape: tl.constexpr):
    """The rounded sums [TILE, BLOCK_R] of some ranks; pieces are added in their order."""
    NUM_PIECES: tl.constexpr = shape[0]
    IS_FEW: tl.constexpr = shape[1]
    MAX_RANK: tl.constexpr = shape[2]
    inside = b_is_row[:, None] & (o_rank < rank)[None, :]
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
def _sums(p_y, p_b, b_is_row, b_inside, b_first, part, rank, stride_rank, shape: tl.constexpr):
    """A block of y [TILE, BLOCK_N] with the adapter's product added to it, rounded. `b_first`: the
    first ranks of what `shrink` made; `part`: where the others are, and the factor."""
    BLOCK_R: tl.constexpr = shape[3]
    ONE_ROUND: tl.constexpr = shape[4]
    p_shrunk, i_in, factor = part
    o_rank = tl.arange(0, BLOCK_R)
    b_y = tl.load(p_y, mask=b_is_row[:, None] & b_inside[None, :], other=0.0)
    b_b = tl.load(
        p_b[None, :] + o_rank[:, None] * stride_rank,
        mask=(o_rank < rank)[:, None] & b_inside[None, :],
        other=0.0,
    )
    b_delta = tl.dot(b_first, b_b, input_precision="ieee")
    if not ONE_ROUND:
        for r in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
            o_rank = r + tl.arange(0, BLOCK_R)
            b_b = tl.load(
                p_b[None, :] + o_rank[:, None].to(tl.int64) * stride_rank,
                mask=(o_rank < rank)[:, None] & b_inside[None, :],
                other=0.0,
            )
            b_shrunk = _shrunk_ranks(p_shrunk, i_in, b_is_row, o_rank, rank, b_y.dtype, shape)
            b_delta = tl.dot(b_shrunk, b_b, b_delta, input_precision="ieee")
    b_sum = (b_y.to(tl.float32) + b_delta * factor).to(b_y.dtype)
    # Without such a projection, to add zero would change the sign of some zeros.
    return tl.where(factor == 0.0, b_y, b_sum)


@triton.jit
def _add_blocks(
    p_y,
    p_b,
    b_row,
    part,
    begin,
    end,
    size,
    rank,
    stride_y,
    stride_rank,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    shape: tl.constexpr,
):
    """Adds to the outputs from `begin` to `end` of one projection, of one tile's rows."""
    b_is_row = b_row >= 0
    p_shrunk, i_in, _ = part
    o_rank = tl.arange(0, shape[3])
    b_first = _shrunk_ranks(p_shrunk, i_in, b_is_row, o_rank, rank, p_y.dtype.element_ty, shape)
    p_rows = p_y + b_row[:, None] * stride_y
    for first_n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        o_n = first_n + tl.arange(0, BLOCK_N)
        b_inside = o_n < size
        p_out = p_rows + o_n[None, :]
        b_sum = _sums(p_out, p_b + o_n, b_is_row, b_inside, b_first, part, rank, stride_rank, shape)
        tl.store(p_out, b_sum, mask=b_is_row[:, None] & b_inside[None, :])


@triton.jit
def _gate_blocks(
    p_y,
    p_out,
    p_b,
    b_row,
    parts,
    begin,
    end,
    width,
    rank,
    stride_y,
    stride_out,
    stride_rank,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    shape: tl.constexpr,
):
    """Writes the gated outputs from `begin` to `end` of one tile's rows."""
    b_is_row = b_row >= 0
    p_shrunk, i_in, factor, up_factor = parts
    gate = (p_shrunk, i_in, factor)
    up = (p_shrunk, i_in + 1, up_factor)
    o_rank = tl.arange(0, shape[3])
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_first = _shrunk_ranks(p_shrunk, i_in, b_is_row, o_rank, rank, dtype, shape)
    b_up_first = _shrunk_ranks(p_shrunk, i_in + 1, b_is_row, o_rank, rank, dtype, shape)
    p_rows = p_y + b_row[:, None] * stride_y
    p_out_rows = p_out + b_row[:, None] * stride_out
    for first_n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        o_n = first_n + tl.arange(0, BLOCK_N)
        inside = o_n < width
        p_gate = p_rows + o_n[None, :]
        b_gate = _sums(p_gate, p_b + o_n, b_is_row, inside, b_first, gate, rank, stride_rank, shape)
        p_up = p_gate + width
        p_up_b = p_b + width + o_n
        b_up = _sums(p_up, p_up_b, b_is_row, inside, b_up_first, up, rank, stride_rank, shape)
        b_gate = b_gate.to(tl.float32)
        b_up = b_up.to(tl.float32)
        b_gated = gelu_gated(b_gate, b_up) if GELU else gated(b_gate, b_up)
        tl.store(
            p_out_rows + o_n[None, :],
            b_gated.to(dtype),
            mask=b_is_row[:, None] & inside[None, :],
        )


@triton.jit
def _ask_for_b(p_b, o_n, size, rank, stride_rank, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr):
    """Prefetches lines of the first ranks."""
    o_rank = tl.minimum(tl.arange(0, BLOCK_R), tl.maximum(rank - 1, 0))
    o_line = tl.minimum(o_n, size - 1)
    ask_early(p_b + o_rank[:, None] * stride_rank + o_line[None, :], DEPENDENT)


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
    stride_rank,
    stride_factors,
    first_b,
    column,
    stride_y,
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
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    one_round: tl.constexpr = (NUM_PIECES, IS_FEW, MAX_RANK, BLOCK_R, True)
    rounds: tl.constexpr = (NUM_PIECES, IS_FEW, MAX_RANK, BLOCK_R, False)
    num_blocks = tl.cdiv(size_0, BLOCK_N) + tl.cdiv(size_1, BLOCK_N) + tl.cdiv(size_2, BLOCK_N)
    release_dependents(DEPENDENT)
    num_items = tl.load(p_count) * num_blocks
    num_own = tl.cdiv(num_items, tl.num_programs(0))
    item = tl.program_id(0) * num_own
    end_item = tl.minimum(item + num_own, num_items)
    p_numbers += first_b
    if DEPENDENT and item < end_item:
        _, first_n, size_before, size = _place_of_block(
            item % num_blocks, size_0, size_1, size_2, BLOCK_N
        )
        i_slot = tl.load(p_slots + item // num_blocks).to(tl.int64)
        rank = tl.load(p_ranks + item // num_blocks)
        p_b = p_numbers + i_slot * UNIT * stride_rank + size_before
        o_n = first_n + tl.arange(0, BLOCK_N // LINE) * LINE
        _ask_for_b(p_b, o_n, size, rank, stride_rank, BLOCK_R, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    while item < end_item:
        i_tile = item // num_blocks
        i_slot = tl.load(p_slots + i_tile).to(tl.int64)
        rank = tl.load(p_ranks + i_tile)
        b_row = tl.load(p_rows + i_tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        i_part, begin, size_before, size = _place_of_block(
            item % num_blocks, size_0, size_1, size_2, BLOCK_N
        )
        num_together = tl.minimum(tl.cdiv(size - begin, BLOCK_N), end_item - item)
        end = begin + num_together * BLOCK_N
        factor = tl.load(p_factors + i_slot * stride_factors + column + i_part)
        part = (p_shrunk, b_row * NUM_PARTS + i_part, factor)
        p_own = p_y + size_before
        p_b = p_numbers + i_slot * UNIT * stride_rank + size_before
        if rank <= BLOCK_R:
            _add_blocks(
                p_own,
                p_b,
                b_row,
                part,
                begin,
                end,
                size,
                rank,
                stride_y,
                stride_rank,
                BLOCK_N,
                STAGES,
                one_round,
            )
        else:
            _add_blocks(
                p_own,
                p_b,
                b_row,
                part,
                begin,
                end,
                size,
                rank,
                stride_y,
                stride_rank,
                BLOCK_N,
                1,
                rounds,
            )
        item += num_together


@triton.jit(do_not_specialize=["column"])
def _expand_gated(
    p_y,
    p_shrunk,
    p_rows,
    p_slots,
    p_ranks,
    p_count,
    p_numbers,
    p_factors,
    stride_rank,
    stride_factors,
    first_b,
    column,
    stride_y,
    p_out,
    stride_out,
    width,
    GELU: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    IS_FEW: tl.constexpr,
    UNIT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of rows without an adapter have rank 0 and slot −1."""
    one_round: tl.constexpr = (NUM_PIECES, IS_FEW, MAX_RANK, BLOCK_R, True)
    rounds: tl.constexpr = (NUM_PIECES, IS_FEW, MAX_RANK, BLOCK_R, False)
    num_blocks = tl.cdiv(width, BLOCK_N)
    release_dependents(DEPENDENT)
    num_items = tl.load(p_count + 1) * num_blocks
    num_own = tl.cdiv(num_items, tl.num_programs(0))
    item = tl.program_id(0) * num_own
    end_item = tl.minimum(item + num_own, num_items)
    p_numbers += first_b
    if DEPENDENT and item < end_item:
        i_slot = tl.maximum(tl.load(p_slots + item // num_blocks), 0).to(tl.int64)
        rank = tl.load(p_ranks + item // num_blocks)
        p_b = p_numbers + i_slot * UNIT * stride_rank
        o_n = item % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N // LINE) * LINE
        _ask_for_b(p_b, o_n, width, rank, stride_rank, BLOCK_R, DEPENDENT)
        _ask_for_b(p_b + width, o_n, width, rank, stride_rank, BLOCK_R, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    while item < end_item:
        i_tile = item // num_blocks
        i_slot = tl.load(p_slots + i_tile).to(tl.int64)
        has_adapter = i_slot >= 0
        i_slot = tl.maximum(i_slot, 0)
        rank = tl.load(p_ranks + i_tile)
        b_row = tl.load(p_rows + i_tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        begin = item % num_blocks * BLOCK_N
        num_together = tl.minimum(num_blocks - item % num_blocks, end_item - item)
        end = begin + num_together * BLOCK_N
        p_factor = p_factors + i_slot * stride_factors + column
        factor = tl.load(p_factor, mask=has_adapter, other=0.0)
        up_factor = tl.load(p_factor + 1, mask=has_adapter, other=0.0)
        parts = (p_shrunk, b_row * 2, factor, up_factor)
        p_b = p_numbers + i_slot * UNIT * stride_rank
        if rank <= BLOCK_R:
            _gate_blocks(
                p_y,
                p_out,
                p_b,
                b_row,
                parts,
                begin,
                end,
                width,
                rank,
                stride_y,
                stride_out,
                stride_rank,
                BLOCK_N,
                STAGES,
                GELU,
                one_round,
            )
        else:
            _gate_blocks(
                p_y,
                p_out,
                p_b,
                b_row,
                parts,
                begin,
                end,
                width,
                rank,
                stride_y,
                stride_out,
                stride_rank,
                BLOCK_N,
                1,
                GELU,
                rounds,
            )
        item += num_together
