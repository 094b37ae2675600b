"""Sums of tensors of which each rank has one, over peer memory, with or without the residual add and RMSNorm behind
them.

A row is one block's item: its ranks' parts are added in float32 in the order of the ranks and rounded once, so a row's
bits depend neither on the batch nor on its place in it. One shot: every rank sends its row to all others and adds all
of them. Two shots: every rank adds a stretch of the row for all, then sends it to them; less is sent where there are
many ranks, for a second meeting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .dependent_launch import launch_options, release_dependents, wait_for_inputs
from .peer_memory import PeerMemory, epoch_of, meet, slot

TWO_SHOT_RANKS = 3
"""From this many ranks on two shots send less than one: 2 (n − 1) / n parts of a row in place of n − 1."""
TWO_SHOT_BYTES = 512 << 10
"""From this size on the second meeting takes less time than what it saves: a guess, not measured."""


def peer_sum(memory: PeerMemory, x: torch.Tensor, *, two_shots: bool | None = None) -> torch.Tensor:
    """The sum of the ranks' x [T, H], which all launch. `two_shots` None: by size."""
    out = torch.empty_like(x)
    _launch(memory, x, x, x, 0.0, out, has_norm=False, two_shots=two_shots, dependent=False)
    return out


def peer_sum_add_rms_norm(
    memory: PeerMemory,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    two_shots: bool | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """As `rms_norm.add_rms_norm` of the rounded sum of the ranks' x, with its bits."""
    out = torch.empty_like(x)
    _launch(memory, x, residual, weight, eps, out, has_norm=True, two_shots=two_shots, dependent=dependent)
    return out


def peer_sum_twin(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in plain torch, in float32 or in the parts' precision, whichever is higher; not rounded."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def _launch(
    memory: PeerMemory,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    has_norm: bool,
    two_shots: bool | None,
    dependent: bool,
) -> None:
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == residual.stride(1) == out.stride(1) == 1
    width = -(-hidden // (8 * memory.size)) * 8
    assert max(hidden, width) * x.itemsize <= memory.slot_bytes
    if two_shots is None:
        two_shots = memory.size >= TWO_SHOT_RANKS and x.numel() * x.itemsize >= TWO_SHOT_BYTES
    block = triton.next_power_of_2(hidden)
    _peer_sum[memory.grid(num_tokens)](
        x,
        residual,
        weight,
        out,
        memory.bases,
        memory.index,
        num_tokens,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        hidden,
        width,
        eps,
        memory.slot_bytes,
        memory.max_polls,
        SIZE=memory.size,
        BLOCK=block,
        PART=triton.next_power_of_2(width),
        TWO_SHOTS=two_shots,
        HAS_NORM=has_norm,
        DEPENDENT=dependent,
        ON_GPU=x.is_cuda,
        # As in `rms_norm`: the norm has the same bits.
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(dependent),
    )


@triton.jit(do_not_specialize=["index", "num_tokens"])
def _peer_sum(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_bases,
    index,
    num_tokens,
    stride_x,
    stride_residual,
    stride_out,
    hidden,
    width,
    eps,
    slot_bytes,
    max_polls,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_block = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    if HAS_NORM:
        b_weight = tl.load(p_weight + o_h, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    p_epoch = epoch_of(p_bases, index, i_block)
    epoch = tl.load(p_epoch, cache_modifier=".cg")
    i_token = i_block.to(tl.int64)
    while i_token < num_tokens:
        p_row, epoch = p_x + i_token * stride_x, epoch + 1
        if TWO_SHOTS:
            _reduce_parts(
                p_row, p_bases, index, i_block, epoch, hidden, width, slot_bytes, max_polls, DTYPE, SIZE, PART, ON_GPU
            )
            epoch += 1
            meet(p_bases, index, i_block, epoch, max_polls, SIZE, ON_GPU)
            p_sum = slot(p_bases, index, i_block, epoch, 0, slot_bytes, DTYPE, SIZE) + o_h
            b_sum = tl.load(p_sum, mask=inside, other=0.0, cache_modifier=".cg")
        else:
            b_own = tl.load(p_row + o_h, mask=inside, other=0.0)
            for rank in tl.static_range(SIZE):
                p_there = slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE)
                tl.store(p_there + o_h, b_own, mask=inside & (index != rank))
            meet(p_bases, index, i_block, epoch, max_polls, SIZE, ON_GPU)
            b_total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(SIZE):
                p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE)
                b_part = tl.load(p_here + o_h, mask=inside & (index != rank), other=0.0, cache_modifier=".cg")
                b_part = tl.where(index == rank, b_own, b_part).to(tl.float32)
                b_total = b_part if rank == 0 else b_total + b_part
            b_sum = b_total.to(DTYPE)
        if i_token + tl.num_programs(0) >= num_tokens:
            release_dependents(DEPENDENT)
        if HAS_NORM:
            p_kept = p_residual + i_token * stride_residual + o_h
            b_kept = b_sum.to(tl.float32) + tl.load(p_kept, mask=inside, other=0.0).to(tl.float32)
            b_sum = b_kept.to(p_residual.dtype.element_ty)
            tl.store(p_kept, b_sum, mask=inside)
            b_kept = b_sum.to(tl.float32)
            variance = tl.sum(b_kept * b_kept, axis=0) / hidden
            b_sum = (b_kept * tl.rsqrt(variance + eps) * b_weight).to(DTYPE)
        tl.store(p_out + i_token * stride_out + o_h, b_sum, mask=inside)
        i_token += tl.num_programs(0)
    tl.store(p_epoch, epoch)


@triton.jit
def _reduce_parts(
    p_row,
    p_bases,
    index,
    i_block,
    epoch,
    hidden,
    width,
    slot_bytes,
    max_polls,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Sends each rank its stretch of the row, adds this rank's, and leaves the sum in the row of the next epoch of
    every rank."""
    o_w = tl.arange(0, PART)
    for rank in tl.static_range(SIZE):
        b_part = tl.load(p_row + rank * width + o_w, mask=(o_w < width) & (rank * width + o_w < hidden), other=0.0)
        tl.store(slot(p_bases, rank, i_block, epoch, index, slot_bytes, DTYPE, SIZE) + o_w, b_part, mask=o_w < width)
    meet(p_bases, index, i_block, epoch, max_polls, SIZE, ON_GPU)
    b_total = tl.zeros([PART], tl.float32)
    for rank in tl.static_range(SIZE):
        p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, DTYPE, SIZE)
        b_part = tl.load(p_here + o_w, mask=o_w < width, other=0.0, cache_modifier=".cg").to(tl.float32)
        b_total = b_part if rank == 0 else b_total + b_part
    is_own = (o_w < width) & (index * width + o_w < hidden)
    for rank in tl.static_range(SIZE):
        p_there = slot(p_bases, rank, i_block, epoch + 1, 0, slot_bytes, DTYPE, SIZE) + index * width
        tl.store(tl.multiple_of(p_there, 16) + o_w, b_total.to(DTYPE), mask=is_own)
