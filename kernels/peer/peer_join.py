"""Stretches of rows, one from each rank, side by side on all of them, over peer memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .peer_memory import PeerMemory, epoch_of, fetched, meet, slot, written

MOST_COLUMNS = 4096
"""Columns that a block sends at once."""


def peer_join(memory: PeerMemory, x: torch.Tensor) -> torch.Tensor:
    """The ranks' x [R, W], which all launch → [R, ranks * W] in their order. Any dtype of 1 to 8
    bytes."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, memory.size * width)
    if not out.numel():
        return out
    # The largest power of two that a slot holds.
    columns = min(MOST_COLUMNS, 1 << (memory.slot_bytes // x.itemsize).bit_length() - 1)
    num_items = num_rows * triton.cdiv(width, columns)
    _peer_join[memory.grid(num_items)](
        x,
        out,
        memory.bases,
        memory.numbers,
        memory.index,
        num_items,
        x.stride(0),
        width,
        memory.slot_bytes,
        memory.max_polls,
        SIZE=memory.size,
        COLUMNS=columns,
        HOST=memory.is_host,
        ON_GPU=x.is_cuda,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["index", "num_items"])
def _peer_join(
    p_x,
    p_out,
    p_bases,
    p_number,
    index,
    num_items,
    stride_x,
    width,
    slot_bytes,
    max_polls,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_block = tl.program_id(0)
    p_epoch = epoch_of(p_number, i_block)
    epoch = tl.load(p_epoch, cache_modifier=".cg")
    o_c = tl.arange(0, COLUMNS)
    num_pieces = tl.cdiv(width, COLUMNS)
    i_item = i_block
    while i_item < num_items:
        epoch += 1
        i_row = (i_item // num_pieces).to(tl.int64)
        first = i_item % num_pieces * COLUMNS
        inside = first + o_c < width
        b_own = tl.load(p_x + i_row * stride_x + first + o_c, mask=inside, other=0)
        for rank in tl.static_range(SIZE):
            p_there = slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE)
            written(p_there + o_c, b_own, inside & (index != rank), HOST)
        meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)
        for rank in tl.static_range(SIZE):
            p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE)
            b_part = fetched(p_here + o_c, inside & (index != rank), HOST)
            b_part = tl.where(index == rank, b_own, b_part)
            tl.store(p_out + (i_row * SIZE + rank) * width + first + o_c, b_part, mask=inside)
        i_item += tl.num_programs(0)
    tl.store(p_epoch, epoch)
