"""Steps of a sum over peer memory, for the kernel of `peer_sum`: how a block sends rows to the
other ranks, adds the ranks' parts of a row, and norms the sum. `place` is (addresses, this rank's
index, block, bytes of a slot, most polls), as `peer_memory` has them."""

from __future__ import annotations

import triton
import triton.language as tl

from .peer_memory import fetched, flagged, flagged_slot, meet, received, slot, written


@triton.jit
def send(
    p_row,
    o_there,
    inside,
    place,
    epoch,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    HOST: tl.constexpr,
):
    """Writes a row into the slots of the other ranks."""
    p_bases, index, i_block, slot_bytes, _ = place
    b_row = tl.load(p_row, mask=inside, other=0.0)
    for rank in tl.static_range(SIZE):
        p_there = slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE)
        written(p_there + o_there, b_row, inside & (index != rank), HOST)


@triton.jit
def added(
    b_own,
    o_here,
    inside,
    place,
    epoch,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    TREE: tl.constexpr,
    HOST: tl.constexpr,
):
    """The sum of this rank's row and those that the others have sent."""
    p_bases, index, i_block, slot_bytes, _ = place
    b_total = b_own.to(tl.float32)
    b_one = b_total
    b_two = b_total
    for rank in tl.static_range(SIZE):
        p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE)
        b_part = fetched(p_here + o_here, inside & (index != rank), HOST)
        b_part = tl.where(index == rank, b_own, b_part).to(tl.float32)
        b_total, b_one, b_two = _add(b_part, b_total, b_one, b_two, rank, TREE)
    return b_total.to(DTYPE)


@triton.jit
def _add(b_part, b_total, b_one, b_two, RANK: tl.constexpr, TREE: tl.constexpr):
    """The total with a rank's part added, and the partial sums of one and of two ranks that wait
    for others. In a tree the total is valid after ranks 1, 3 and 7 only."""
    if not TREE:
        b_total = b_part if RANK == 0 else b_total + b_part
    elif RANK % 2 == 0:
        b_one = b_part
    elif RANK % 4 == 1:
        b_two = b_one + b_part
        b_total = b_two if RANK == 1 else b_total
    else:
        b_pair = b_two + (b_one + b_part)
        b_total = b_pair if RANK == 3 else b_total + b_pair
    return b_total, b_one, b_two


@triton.jit
def exchanged(
    b_own,
    inside,
    place,
    exchange,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The sum of the ranks' rows, which are exchanged in flagged words."""
    p_bases, index, i_block, slot_bytes, max_polls = place
    o_h = tl.arange(0, BLOCK)
    b_words = flagged(b_own, exchange)
    for rank in tl.static_range(SIZE):
        if rank != index:
            p_there = flagged_slot(p_bases, rank, i_block, exchange, index, slot_bytes, SIZE)
            written(p_there + o_h, b_words, inside, HOST)
    b_total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        b_part = b_own
        if rank != index:
            p_here = flagged_slot(p_bases, index, i_block, exchange, rank, slot_bytes, SIZE)
            b_part = received(p_here + o_h, inside, exchange, max_polls, DTYPE, ON_GPU)
        b_total = b_part.to(tl.float32) if rank == 0 else b_total + b_part.to(tl.float32)
    return b_total.to(DTYPE)


@triton.jit
def reduce_parts(
    rows, place, epoch, DTYPE: tl.constexpr, shape: tl.constexpr, ON_GPU: tl.constexpr
):
    """Sends each rank its stretch of the rows, adds this rank's, and leaves the sums in the rows of
    the next epoch of every rank. `rows`: their pointer, first, number and stride, the width of a
    row and of a stretch, and the stride of sums in a slot."""
    p_bases, index, i_block, slot_bytes, max_polls = place
    p_x, i_first, num_tokens, stride_x, hidden, width, stride_slot = rows
    SIZE: tl.constexpr = shape[0]
    PART: tl.constexpr = shape[1]
    GROUP: tl.constexpr = shape[2]
    TREE: tl.constexpr = shape[3]
    HOST: tl.constexpr = shape[4]
    o_w = tl.arange(0, PART)
    inside = o_w < width
    for i_row in range(GROUP):
        p_row = p_x + (i_first + i_row) * stride_x
        is_there = inside & (i_first + i_row < num_tokens)
        for rank in tl.static_range(SIZE):
            b_part = tl.load(
                p_row + rank * width + o_w, mask=is_there & (rank * width + o_w < hidden), other=0.0
            )
            p_there = (
                slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE) + i_row * width
            )
            written(tl.multiple_of(p_there, 16) + o_w, b_part, is_there, HOST)
    meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)
    for i_row in range(GROUP):
        is_there = inside & (i_first + i_row < num_tokens)
        b_total = tl.zeros([PART], tl.float32)
        b_one = b_total
        b_two = b_total
        for rank in tl.static_range(SIZE):
            p_here = (
                slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE) + i_row * width
            )
            b_part = fetched(tl.multiple_of(p_here, 16) + o_w, is_there, HOST)
            b_total, b_one, b_two = _add(b_part.to(tl.float32), b_total, b_one, b_two, rank, TREE)
        is_own = is_there & (index * width + o_w < hidden)
        for rank in tl.static_range(SIZE):
            p_there = slot(p_bases, rank, i_block, epoch + 1, 0, slot_bytes, DTYPE, SIZE)
            p_there += i_row * stride_slot + index * width
            written(tl.multiple_of(p_there, 16) + o_w, b_total.to(DTYPE), is_own, HOST)


@triton.jit
def add_norm(b_sum, p_kept, b_weight, inside, hidden, eps):
    """Adds the sum to the residual and returns the norm of that, as `rms_norm._rms_norm`."""
    b_kept = b_sum.to(tl.float32) + tl.load(p_kept, mask=inside, other=0.0).to(tl.float32)
    b_kept = b_kept.to(p_kept.dtype.element_ty)
    tl.store(p_kept, b_kept, mask=inside)
    b_kept = b_kept.to(tl.float32)
    variance = tl.sum(b_kept * b_kept, axis=0) / hidden
    return (b_kept * tl.rsqrt(variance + eps) * b_weight).to(b_sum.dtype)
