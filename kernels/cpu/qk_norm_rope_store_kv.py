"""Bias, norm and rotation of queries and keys, and storing keys and values in a CPU's paged cache.

A CPU's cache holds each block's keys by dimension, [Hk, D, block_size], so that sixteen keys meet a
query at once; its values by position, [Hk, block_size, D]. Twin:
`kernels.attention.qk_norm_rope_store_kv`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from ..attention.rotary_pairs import RotaryPairs
from .compiler.compiled import Kernel, address_of, argument, float_bits, items
from .compiler.scalars import float32_at, int64_at, put, size_of
from .compiler.simd import add, fma, load, mul, splat, store, sum_of
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

MAX_HEAD_DIM = 512


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    pairs: RotaryPairs | None = None,
) -> torch.Tensor:
    """Stores keys and values and returns the queries [T, Hq, D]. qkv [T, (Hq + 2 Hk) D] contiguous,
    positions and slots int64 [T], cos_sin float32 [positions, D], D divides by 16; kv_cache [2,
    num_blocks, Hk, block_size, D], in which the heads of a block lie together, takes keys and
    values; q_norm and k_norm [D] are of qkv's dtype
    or float32. `pairs`: those that rotate, whose numbers stay in their places; None: halves of a
    head."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim
    num_q_heads = num_heads - 2 * num_kv_heads
    assert qkv.is_contiguous()
    side, block, *within = kv_cache.stride()
    assert within == [block_size * head_dim, head_dim, 1]
    assert positions.dtype == slots.dtype == torch.int64
    assert cos_sin.dtype == torch.float32
    assert head_dim % NUM_LANES == 0
    assert head_dim <= MAX_HEAD_DIM
    for norm in (q_norm, k_norm):
        assert norm is None or norm.dtype in (qkv.dtype, torch.float32)
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    tensors = (qkv, positions, slots, cos_sin, kv_cache, bias, q_norm, k_norm, q)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = (num_q_heads, num_kv_heads, head_dim, block_size, side, block)
    pairs = pairs or RotaryPairs(head_dim)
    kernel = KERNEL if q_norm is None or q_norm.dtype == qkv.dtype else WIDE_KERNEL
    kernel(
        qkv.dtype,
        num_tokens,
        qkv.numel(),
        *addresses,
        *sizes,
        float_bits(eps),
        pairs.width,
        pairs.interleaved,
    )
    return q


@njit
def _token(arguments: int, i: int, p_scratch: int, element: Any, norm_element: Any) -> None:
    num_q_heads = argument(arguments, 9)
    num_kv_heads = argument(arguments, 10)
    head_dim = argument(arguments, 11)
    size = head_dim * size_of(element)
    num_heads = num_q_heads + 2 * num_kv_heads
    p_qkv = argument(arguments, 0) + i * num_heads * size
    p_bias = argument(arguments, 5)
    p_cos_sin = argument(arguments, 3) + int64_at(argument(arguments, 1) + i * 8) * head_dim * 4
    for head in range(num_heads):
        p_head_bias = p_bias + head * size if p_bias else 0
        _head(p_qkv + head * size, p_head_bias, p_scratch, head_dim, element)
        if head < num_q_heads:
            _norm(arguments, argument(arguments, 6), p_scratch, head_dim, norm_element)
            _rotate(arguments, p_scratch, p_cos_sin, head_dim)
            p_q = argument(arguments, 8) + (i * num_q_heads + head) * size
            for d in range(0, head_dim, NUM_LANES):
                store(p_q + d * size_of(element), load(p_scratch + d * 4, F32_ELEMENT), element)
        else:
            kv_head = head - num_q_heads
            if kv_head < num_kv_heads:
                _norm(arguments, argument(arguments, 7), p_scratch, head_dim, norm_element)
                _rotate(arguments, p_scratch, p_cos_sin, head_dim)
            _keep(arguments, i, kv_head, p_scratch, element)


@njit
def _head(p_x: int, p_bias: int, p_scratch: int, head_dim: int, element: Any) -> None:
    for d in range(0, head_dim, NUM_LANES):
        x = load(p_x + d * size_of(element), element)
        if p_bias:
            x = add(x, load(p_bias + d * size_of(element), element))
        store(p_scratch + d * 4, x, F32_ELEMENT)


@njit
def _norm(arguments: int, p_weight: int, p_scratch: int, head_dim: int, element: Any) -> None:
    if not p_weight:
        return
    squares = splat(F32(0))
    for d in range(0, head_dim, NUM_LANES):
        x = load(p_scratch + d * 4, F32_ELEMENT)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, 15))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(head_dim) + eps))
    for d in range(0, head_dim, NUM_LANES):
        x = mul(load(p_scratch + d * 4, F32_ELEMENT), scale)
        store(
            p_scratch + d * 4, mul(x, load(p_weight + d * size_of(element), element)), F32_ELEMENT
        )


@njit
def _rotate(arguments: int, p_scratch: int, p_cos_sin: int, head_dim: int) -> None:
    # Numbers are processed one at a time: half a head need not fill the lanes.
    half = head_dim * 2
    width = argument(arguments, 16) * 2
    is_interleaved = argument(arguments, 17)
    for at in range(0, width, 4):
        p_low = p_scratch + (2 * at if is_interleaved else at)
        p_high = p_low + (4 if is_interleaved else width)
        low = float32_at(p_low)
        high = float32_at(p_high)
        cos = float32_at(p_cos_sin + at)
        sin = float32_at(p_cos_sin + half + at)
        put(p_low, low * cos - high * sin, F32_ELEMENT)
        put(p_high, high * cos + low * sin, F32_ELEMENT)


@njit
def _keep(arguments: int, i: int, kv_head: int, p_scratch: int, element: Any) -> None:
    """Stores one head of a token; `kv_head` counts keys first, then values."""
    num_kv_heads = argument(arguments, 10)
    head_dim = argument(arguments, 11)
    block_size = argument(arguments, 12)
    slot = int64_at(argument(arguments, 2) + i * 8)
    block = slot // block_size
    offset = slot % block_size
    is_value = kv_head >= num_kv_heads
    first = block * argument(arguments, 14)
    if is_value:
        first += argument(arguments, 13)
        kv_head -= num_kv_heads
    first += kv_head * block_size * head_dim
    p_head = argument(arguments, 4) + first * size_of(element)
    if is_value:
        for d in range(0, head_dim, NUM_LANES):
            at = p_head + (offset * head_dim + d) * size_of(element)
            store(at, load(p_scratch + d * 4, F32_ELEMENT), element)
    else:
        for d in range(head_dim):
            put(
                p_head + (d * block_size + offset) * size_of(element),
                float32_at(p_scratch + d * 4),
                element,
            )


def _tokens(element: Any, norm_element: Any) -> Any:
    def work(arguments: int) -> None:
        scratch = np.empty(MAX_HEAD_DIM, np.float32)
        for i in items(arguments):
            _token(arguments, i, scratch.ctypes.data, element, norm_element)

    return work


KERNEL = Kernel(_tokens(F32_ELEMENT, F32_ELEMENT), _tokens(BF16_ELEMENT, BF16_ELEMENT))
WIDE_KERNEL = Kernel(_tokens(F32_ELEMENT, F32_ELEMENT), _tokens(BF16_ELEMENT, F32_ELEMENT))
"""Kernel for norms in float32."""
