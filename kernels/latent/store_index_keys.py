"""Norm, rotation and storing of the keys of sparse indexers in a paged cache, and rotation of their
queries, in one launch. Twin: `index_twin`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.rotary_pairs import RotaryPairs
from .latent_tiles import rounded

HEADS = 16
"""Heads of a program that rotates queries."""


def store_index_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    *,
    norm: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    pairs: RotaryPairs,
) -> None:
    """Rotates the first numbers of each head of q [T, Hi, D] in place, and stores k [T, D] in keys
    [num_blocks, block_size, D], whose rows may lie apart: normed by mean and variance, norm and
    bias [D], the first numbers rotated. positions and slots are integers [T], and a negative slot
    stores nothing; cos_sin float32 [positions, pairs.width]."""
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous()
    assert k.stride(1) == keys.stride(2) == 1
    assert k.shape[1] == keys.shape[2] == dim
    assert pairs.width == cos_sin.shape[1] <= dim
    _store_keys[(num_tokens, 1 + triton.cdiv(num_heads, HEADS))](
        q,
        k,
        positions,
        slots,
        cos_sin,
        keys,
        norm,
        bias,
        eps,
        k.stride(0),
        keys.stride(0),
        keys.stride(1),
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        PAGE=keys.shape[1],
        HALF=pairs.width // 2,
        BLOCK_HALF=triton.next_power_of_2(pairs.width // 2),
        HEADS=HEADS,
        INTERLEAVED=pairs.interleaved,
        num_warps=1,
    )


@triton.jit
def _store_keys(
    p_q,
    p_k,
    p_position,
    p_slot,
    p_cos_sin,
    p_keys,
    p_norm,
    p_bias,
    eps,
    stride_k,
    stride_block,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_pair = tl.arange(0, BLOCK_HALF)
    is_pair = o_pair < HALF
    o_low = 2 * o_pair if INTERLEAVED else o_pair
    o_high = o_low + (1 if INTERLEAVED else HALF)
    p_angle = p_cos_sin + tl.load(p_position + i_token).to(tl.int64) * (2 * HALF) + o_pair
    b_cos = tl.load(p_angle, mask=is_pair, other=0.0)
    b_sin = tl.load(p_angle + HALF, mask=is_pair, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(p_slot + i_token).to(tl.int64)
        p_own = p_k + i_token * stride_k
        p_out = p_keys + slot // PAGE * stride_block + slot % PAGE * stride_slot
        o_d = tl.arange(0, BLOCK_DIM)
        is_d = o_d < DIM
        b_k = tl.load(p_own + o_d, mask=is_d, other=0.0).to(tl.float32)
        mean = tl.sum(b_k, axis=0) / DIM
        b_rest = tl.where(is_d, b_k - mean, 0.0)
        scale = tl.rsqrt(tl.sum(b_rest * b_rest, axis=0) / DIM + eps)
        is_plain = is_d & (o_d >= 2 * HALF) & (slot >= 0)
        b_out = _normed(b_k, mean, scale, p_norm, p_bias, o_d, is_d)
        tl.store(p_out + o_d, rounded(b_out, p_keys.dtype.element_ty), mask=is_plain)
        b_low = tl.load(p_own + o_low, mask=is_pair, other=0.0).to(tl.float32)
        b_high = tl.load(p_own + o_high, mask=is_pair, other=0.0).to(tl.float32)
        b_low = _normed(b_low, mean, scale, p_norm, p_bias, o_low, is_pair)
        b_high = _normed(b_high, mean, scale, p_norm, p_bias, o_high, is_pair)
        is_stored = is_pair & (slot >= 0)
        b_first = rounded(b_low * b_cos - b_high * b_sin, p_keys.dtype.element_ty)
        b_second = rounded(b_high * b_cos + b_low * b_sin, p_keys.dtype.element_ty)
        tl.store(p_out + o_low, b_first, mask=is_stored)
        tl.store(p_out + o_high, b_second, mask=is_stored)
    else:
        o_head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        p_heads = p_q + (i_token * NUM_HEADS + o_head)[:, None] * DIM
        inside = (o_head < NUM_HEADS)[:, None] & is_pair[None, :]
        b_x = tl.load(p_heads + o_low[None, :], mask=inside, other=0.0).to(tl.float32)
        b_y = tl.load(p_heads + o_high[None, :], mask=inside, other=0.0).to(tl.float32)
        b_left = b_x * b_cos[None, :] - b_y * b_sin[None, :]
        b_right = b_y * b_cos[None, :] + b_x * b_sin[None, :]
        tl.store(p_heads + o_low[None, :], b_left.to(p_q.dtype.element_ty), mask=inside)
        tl.store(p_heads + o_high[None, :], b_right.to(p_q.dtype.element_ty), mask=inside)


@triton.jit
def _normed(b_x, mean, scale, p_norm, p_bias, o_d, is_d):
    b_norm = tl.load(p_norm + o_d, mask=is_d, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_d, mask=is_d, other=0.0).to(tl.float32)
    return (b_x - mean) * scale * b_norm + b_bias
