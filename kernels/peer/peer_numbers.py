"""Numbers of a row that ranks combine within a kernel, over peer memory. Of one rank nothing is
exchanged.

All ranks read what all have written, their own numbers too, so they go the same way afterwards even
where their numbers should have been equal and are not. `peers` is (addresses, this rank's index,
block, bytes of a slot, most polls, whether the memory is the host's), as `peer_memory` has them;
`epoch` is the number of the meeting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .peer_memory import epoch_of, fetched, meet, slot, written


@triton.jit
def last_epoch(p_number, i_block, SIZE: tl.constexpr):
    """The number of a block's last meeting."""
    epoch = 0
    if SIZE > 1:
        epoch = tl.load(epoch_of(p_number, i_block), cache_modifier=".cg")
    return epoch


@triton.jit
def keep_epoch(p_number, i_block, epoch, SIZE: tl.constexpr):
    if SIZE > 1:
        tl.store(epoch_of(p_number, i_block), epoch)


@triton.jit
def put_number(x, place, peers, epoch, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Writes a number to this rank's slot on every rank, `place` times 8 bytes after its
    beginning."""
    p_bases, index, i_block, slot_bytes, _, HOST = peers
    step: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    for rank in tl.static_range(SIZE):
        written(
            slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE) + place * step,
            x,
            True,
            HOST,
        )


@triton.jit
def number_of(rank, place, peers, epoch, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """The number that a rank has written, after the meeting."""
    p_bases, index, i_block, slot_bytes, _, HOST = peers
    step: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE) + place * step
    return fetched(p_here, True, HOST)


@triton.jit
def meet_peers(peers, epoch, SIZE: tl.constexpr, ON_GPU: tl.constexpr):
    p_bases, index, i_block, _, max_polls, HOST = peers
    meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)


@triton.jit
def highest_of_ranks(x, y, peers, epoch, SIZE: tl.constexpr, ON_GPU: tl.constexpr):
    """The highest float32 x of all ranks, and the highest y."""
    if SIZE > 1:
        put_number(x, 0, peers, epoch, tl.float32, SIZE)
        put_number(y, 1, peers, epoch, tl.float32, SIZE)
        meet_peers(peers, epoch, SIZE, ON_GPU)
        x = number_of(0, 0, peers, epoch, tl.float32, SIZE)
        y = number_of(0, 1, peers, epoch, tl.float32, SIZE)
        for rank in tl.static_range(1, SIZE):
            x = tl.maximum(x, number_of(rank, 0, peers, epoch, tl.float32, SIZE))
            y = tl.maximum(y, number_of(rank, 1, peers, epoch, tl.float32, SIZE))
    return x, y


@triton.jit
def sums_of_ranks(count, total, peers, epoch, SIZE: tl.constexpr, ON_GPU: tl.constexpr):
    """The sums of all ranks' counts int32, and of their totals int64."""
    if SIZE > 1:
        put_number(count, 0, peers, epoch, tl.int32, SIZE)
        put_number(total, 1, peers, epoch, tl.int64, SIZE)
        meet_peers(peers, epoch, SIZE, ON_GPU)
        count = number_of(0, 0, peers, epoch, tl.int32, SIZE)
        total = number_of(0, 1, peers, epoch, tl.int64, SIZE)
        for rank in tl.static_range(1, SIZE):
            count += number_of(rank, 0, peers, epoch, tl.int32, SIZE)
            total += number_of(rank, 1, peers, epoch, tl.int64, SIZE)
    return count, total


@triton.jit
def best_of_ranks(score, token, logit, peers, epoch, SIZE: tl.constexpr, ON_GPU: tl.constexpr):
    """The token int32 with the highest score float32 of all ranks, the first one's of equals, and
    its logit float32."""
    if SIZE > 1:
        put_number(score, 0, peers, epoch, tl.float32, SIZE)
        put_number(token, 1, peers, epoch, tl.int32, SIZE)
        put_number(logit, 2, peers, epoch, tl.float32, SIZE)
        meet_peers(peers, epoch, SIZE, ON_GPU)
        score = number_of(0, 0, peers, epoch, tl.float32, SIZE)
        token = number_of(0, 1, peers, epoch, tl.int32, SIZE)
        logit = number_of(0, 2, peers, epoch, tl.float32, SIZE)
        for rank in tl.static_range(1, SIZE):
            other = number_of(rank, 0, peers, epoch, tl.float32, SIZE)
            is_better = other > score
            token = tl.where(is_better, number_of(rank, 1, peers, epoch, tl.int32, SIZE), token)
            logit = tl.where(is_better, number_of(rank, 2, peers, epoch, tl.float32, SIZE), logit)
            score = tl.where(is_better, other, score)
    return token, logit
