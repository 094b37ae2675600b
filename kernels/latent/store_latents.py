"""Norm, rotation and storing of the latents of tokens in a paged cache, and rotation of their
queries, in one launch. Twin: `latent_twin`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.rotary_pairs import RotaryPairs
from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from .latent_tiles import rounded

HEADS = 16
"""Heads of a program that rotates queries."""


def store_latents(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    pairs: RotaryPairs,
    dependent: bool = False,
) -> None:
    """Rotates the last numbers of each head of q [T, Hq, D] in place, and stores the latents of kv
    [T, width] in cache [num_blocks, block_size, width]: the first numbers normed by norm [rank],
    the others rotated. positions and slots are integers [T], and a negative slot
    stores nothing; cos_sin float32 [positions, width - rank]. A cache in e4m3 has what it cannot
    hold as its largest number. All of `pairs` rotate, and stay in
    their places. With `dependent`, the kernel before may still be writing q and kv."""
    num_tokens, num_heads, head_dim = q.shape
    rank = len(norm)
    rotary = kv.shape[1] - rank
    assert q.is_contiguous()
    assert kv.stride(1) == cache.stride(2) == 1
    assert pairs.width == rotary == cos_sin.shape[1]
    _store_latents[(num_tokens, 1 + triton.cdiv(num_heads, HEADS))](
        q,
        kv,
        positions,
        slots,
        cos_sin,
        cache,
        norm,
        eps,
        kv.stride(0),
        cache.stride(0),
        cache.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE=cache.shape[1],
        RANK=rank,
        BLOCK_RANK=triton.next_power_of_2(rank),
        HALF=rotary // 2,
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        HEADS=HEADS,
        INTERLEAVED=pairs.interleaved,
        DEPENDENT=dependent,
        num_warps=1,
        **launch_options(dependent),
    )


@triton.jit
def _store_latents(
    p_q,
    p_kv,
    p_position,
    p_slot,
    p_cos_sin,
    p_cache,
    p_norm,
    eps,
    stride_kv,
    stride_block,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_pair = tl.arange(0, BLOCK_HALF)
    is_pair = o_pair < HALF
    o_low = 2 * o_pair if INTERLEAVED else o_pair
    o_high = o_low + (1 if INTERLEAVED else HALF)
    p_angle = p_cos_sin + tl.load(p_position + i_token).to(tl.int64) * (2 * HALF) + o_pair
    b_cos = tl.load(p_angle, mask=is_pair, other=0.0)
    b_sin = tl.load(p_angle + HALF, mask=is_pair, other=0.0)
    angles = (b_cos[None, :], b_sin[None, :])
    places = (o_low[None, :], o_high[None, :])
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    if tl.program_id(1) == 0:
        slot = tl.load(p_slot + i_token).to(tl.int64)
        p_latent = p_cache + slot // PAGE * stride_block + slot % PAGE * stride_slot
        p_own = p_kv + i_token * stride_kv
        o_c = tl.arange(0, BLOCK_RANK)
        is_c = o_c < RANK
        b_norm = tl.load(p_norm + o_c, mask=is_c, other=0.0).to(tl.float32)
        b_c = tl.load(p_own + o_c, mask=is_c, other=0.0).to(tl.float32)
        b_c = b_c * tl.rsqrt(tl.sum(b_c * b_c, axis=0) / RANK + eps) * b_norm
        tl.store(p_latent + o_c, rounded(b_c, p_cache.dtype.element_ty), mask=is_c & (slot >= 0))
        is_stored = is_pair[None, :] & (slot >= 0)
        _rotate(p_own + RANK, p_latent + RANK, places, angles, is_pair[None, :], is_stored)
    else:
        o_head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        p_heads = p_q + (i_token * NUM_HEADS + o_head)[:, None] * HEAD_DIM + (HEAD_DIM - 2 * HALF)
        inside = (o_head < NUM_HEADS)[:, None] & is_pair[None, :]
        _rotate(p_heads, p_heads, places, angles, inside, inside)


@triton.jit
def _rotate(p_x, p_out, places, angles, is_read, is_stored):
    """Rotates pairs of numbers; `places`: those of their first and second ones; `angles`: cosines
    and sines."""
    b_low = tl.load(p_x + places[0], mask=is_read, other=0.0).to(tl.float32)
    b_high = tl.load(p_x + places[1], mask=is_read, other=0.0).to(tl.float32)
    b_left = b_low * angles[0] - b_high * angles[1]
    b_right = b_high * angles[0] + b_low * angles[1]
    tl.store(p_out + places[0], rounded(b_left, p_out.dtype.element_ty), mask=is_stored)
    tl.store(p_out + places[1], rounded(b_right, p_out.dtype.element_ty), mask=is_stored)
