"""Sums of tensors of which each rank has one, over peer memory, with or without the residual add
and RMSNorm after them.

A row is one block's item: its ranks' parts are added in float32, in the order of the ranks or in a
tree, and rounded once, so a row's bits depend neither on the batch nor on its place in it, nor on
the way:

- Flagged: every rank sends its row to all others in words that say when they are there. For few
  rows.
- One shot: every rank sends its row to all others.
- Grouped: as one shot, several rows before it waits for those of the others. For many rows without
  a norm.
- Two shots: every rank adds a stretch of the row for all, then sends it to them; less is sent where
  there are many ranks, for a second meeting. Grouped two shots are for many rows, with or without a
  norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from .peer_memory import (
    FLAGGED_BLOCKS,
    NUM_BLOCKS,
    PeerMemory,
    epoch_of,
    exchange_of,
    fetched,
    meet,
    slot,
)
from .peer_parts import add_norm, added, exchanged, reduce_parts, send

TWO_SHOT_RANKS = 3
"""From this many ranks on two shots send less than one: 2 (n − 1) / n parts of a row in place of n
− 1."""
TWO_SHOT_BYTES = 512 << 10
"""Size from which the second meeting takes less time than it saves: an estimate, not measured."""
FLAGGED_BYTES = 1 << 20
"""Up to this size words with flags, which take twice as many bytes, save time: 3.8 µs with the norm
in place of 6.3 at 8 KiB, 6.5 in place of 8.2 at 512 KiB (two H100, 2026-11-25)."""
HOST_FLAGGED_BYTES = 64 << 10
"""The same over host memory, which each look reads again over the bus: a guess, not measured."""
GROUP_ROWS = 4
"""Rows that a block sends at once, of so many that each block has some: a meeting takes 4 µs, in
which nothing is sent. 218 µs in place of 254 for 64 MiB; with the norm, whose bytes fill the
pauses, 282 in place of 270 (two H100, 2026-11-25)."""


TREE_RANKS = (2, 4, 8)


class Way(IntEnum):
    FLAGGED = 0
    ONE_SHOT = 1
    GROUPED = 2
    TWO_SHOTS = 3
    GROUPED_TWO_SHOTS = 4


UNGROUPED = {Way.GROUPED: Way.ONE_SHOT, Way.GROUPED_TWO_SHOTS: Way.TWO_SHOTS}


def peer_sum(memory: PeerMemory, x: torch.Tensor, *, way: Way | None = None) -> torch.Tensor:
    """The sum of the ranks' x [T, H], which all launch. `way` None: by size."""
    out = torch.empty_like(x)
    _launch(memory, x, x, x, 0.0, out, has_norm=False, way=way, dependent=False)
    return out


def peer_tree_sum(
    memory: PeerMemory, x: torch.Tensor, dtype: torch.dtype, *, way: Way | None = None
) -> torch.Tensor:
    """Like `peer_sum`, for float32 x [T, H] of 2, 4 or 8 ranks, which are added as `tree_sum` adds
    them; in the dtype, to which the sum is rounded once."""
    assert x.dtype == torch.float32
    assert memory.size in TREE_RANKS
    out = torch.empty_like(x, dtype=dtype)
    _launch(memory, x, x, x, 0.0, out, has_norm=False, is_tree=True, way=way, dependent=False)
    return out


def peer_sum_add_rms_norm(
    memory: PeerMemory,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    way: Way | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """Like `rms_norm.add_rms_norm` of the rounded sum of the ranks' x, with its bits."""
    out = torch.empty_like(x)
    _launch(memory, x, residual, weight, eps, out, has_norm=True, way=way, dependent=dependent)
    return out


def peer_sum_twin(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in plain torch, in float32 or in the parts' precision, whichever is higher; not
    rounded."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def way_of(memory: PeerMemory, x: torch.Tensor, *, has_norm: bool) -> Way:
    """The fastest way for x [T, H]."""
    num_rows = len(x)
    num_bytes = x.numel() * x.itemsize
    row_bytes = x.shape[1] * x.itemsize
    can_group = (
        GROUP_ROWS * row_bytes <= memory.slot_bytes and num_rows >= GROUP_ROWS * NUM_BLOCKS.value
    )
    if memory.size >= TWO_SHOT_RANKS and num_bytes >= TWO_SHOT_BYTES:
        return Way.GROUPED_TWO_SHOTS if can_group else Way.TWO_SHOTS
    can_flag = (
        x.itemsize == 2 and x.shape[1] == memory.flagged_len and num_rows <= FLAGGED_BLOCKS.value
    )
    if can_flag and num_bytes <= (HOST_FLAGGED_BYTES if memory.is_host else FLAGGED_BYTES):
        return Way.FLAGGED
    return Way.GROUPED if can_group and not has_norm else Way.ONE_SHOT


def _launch(
    memory: PeerMemory,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    has_norm: bool,
    is_tree: bool = False,
    way: Way | None,
    dependent: bool,
) -> None:
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == residual.stride(1) == out.stride(1) == 1
    width = -(-hidden // (8 * memory.size)) * 8
    way = way_of(memory, x, has_norm=has_norm) if way is None else way
    group = GROUP_ROWS if way in UNGROUPED else 1
    assert max(group * hidden, width) * x.itemsize <= memory.slot_bytes
    assert way is not Way.FLAGGED or (
        x.itemsize == 2 and hidden == memory.flagged_len <= memory.slot_bytes // 4
    )
    block = triton.next_power_of_2(hidden)
    most_blocks = FLAGGED_BLOCKS.value if way is Way.FLAGGED else NUM_BLOCKS.value
    _peer_sum[memory.grid(triton.cdiv(num_tokens, group), most_blocks)](
        x,
        residual,
        weight,
        out,
        *(memory.bases, memory.numbers, memory.index),
        num_tokens,
        *(x.stride(0), residual.stride(0), out.stride(0)),
        hidden,
        width,
        eps,
        memory.slot_bytes,
        memory.slot_bytes // (group * x.itemsize) // 8 * 8,
        memory.max_polls,
        SIZE=memory.size,
        BLOCK=block,
        PART=triton.next_power_of_2(width),
        WAY=int(UNGROUPED.get(way, way)),
        GROUP=group,
        HAS_NORM=has_norm,
        TREE=is_tree,
        HOST=memory.is_host,
        DEPENDENT=dependent,
        ON_GPU=x.is_cuda,
        # As in `rms_norm`: the norm has the same bits.
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )


FLAGGED, ONE_SHOT, TWO_SHOTS = (
    tl.constexpr(int(way)) for way in (Way.FLAGGED, Way.ONE_SHOT, Way.TWO_SHOTS)
)


@triton.jit(do_not_specialize=["index", "num_tokens"])
def _peer_sum(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_bases,
    p_number,
    index,
    num_tokens,
    stride_x,
    stride_residual,
    stride_out,
    hidden,
    width,
    eps,
    slot_bytes,
    stride_slot,
    max_polls,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TREE: tl.constexpr,
    HOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_block = tl.program_id(0)
    place = (p_bases, index, i_block, slot_bytes, max_polls)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    if HAS_NORM:
        b_weight = tl.load(p_weight + o_h, mask=inside, other=0.0).to(tl.float32)
    # Before the inputs are there: neither addresses nor weights are written by an earlier launch.
    p_epoch = exchange_of(p_number, i_block) if WAY == FLAGGED else epoch_of(p_number, i_block)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    epoch = tl.load(p_epoch, cache_modifier=".cg")
    i_first = i_block.to(tl.int64) * GROUP
    step = tl.num_programs(0) * GROUP
    while i_first < num_tokens:
        epoch += 1
        if WAY == ONE_SHOT:
            for i_row in range(GROUP):
                is_there = inside & (i_first + i_row < num_tokens)
                p_row = p_x + (i_first + i_row) * stride_x + o_h
                o_there = i_row * stride_slot + o_h
                send(p_row, o_there, is_there, place, epoch, DTYPE, SIZE, HOST)
            meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)
        elif WAY == TWO_SHOTS:
            rows = (p_x, i_first, num_tokens, stride_x, hidden, width, stride_slot)
            shape: tl.constexpr = (SIZE, PART, GROUP, TREE, HOST)
            reduce_parts(rows, place, epoch, DTYPE, shape, ON_GPU)
            epoch += 1
            meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)
        for i_row in range(GROUP):
            i_token = i_first + i_row
            is_there = inside & (i_token < num_tokens)
            if WAY == TWO_SHOTS:
                p_sum = (
                    slot(p_bases, index, i_block, epoch, 0, slot_bytes, DTYPE, SIZE)
                    + i_row * stride_slot
                )
                b_sum = fetched(p_sum + o_h, is_there, HOST)
            else:
                b_own = tl.load(p_x + i_token * stride_x + o_h, mask=is_there, other=0.0)
                if WAY == FLAGGED:
                    b_sum = exchanged(b_own, inside, place, epoch, DTYPE, SIZE, BLOCK, HOST, ON_GPU)
                else:
                    o_here = i_row * stride_slot + o_h
                    b_sum = added(b_own, o_here, is_there, place, epoch, DTYPE, SIZE, TREE, HOST)
            if HAS_NORM:
                p_kept = p_residual + i_token * stride_residual + o_h
                b_sum = add_norm(b_sum, p_kept, b_weight, is_there, hidden, eps)
            tl.store(
                p_out + i_token * stride_out + o_h, b_sum.to(p_out.dtype.element_ty), mask=is_there
            )
        i_first += step
    tl.store(p_epoch, epoch)
