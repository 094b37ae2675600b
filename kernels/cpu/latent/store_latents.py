"""Norm, rotation and storing of the latents of tokens in a CPU's paged cache, and rotation of their
queries. Twin: `kernels.latent.latent_twin`."""

from __future__ import annotations

import math
from typing import Any

import torch
from numba import njit

from ...attention.rotary_pairs import RotaryPairs
from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, int64_at, number_at, put, size_of
from ..compiler.simd import fma, load, mul, splat, store, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES


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
) -> None:
    """Rotates the last numbers of each head of q [T, Hq, D] in place, and stores the latents of kv
    [T, width] in cache [num_blocks, block_size, width], whose rows may lie apart: the first numbers
    normed by norm [rank], the others rotated. positions and slots int64 [T]; cos_sin float32
    [positions, width - rank]; q, kv and the cache have one dtype, the norm too; rank divides by 16.
    All of `pairs` rotate, and stay in their places."""
    _, block_size, width = cache.shape
    assert q.is_contiguous()
    assert kv.is_contiguous()
    assert kv.shape[1] == width
    assert cache.stride(2) == 1
    assert positions.dtype == slots.dtype == torch.int64
    assert cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] == pairs.width == width - len(norm)
    assert norm.dtype == q.dtype == kv.dtype == cache.dtype
    assert len(norm) % NUM_LANES == 0
    tensors = (q, kv, positions, slots, cos_sin, cache, norm)
    KERNEL(
        q.dtype,
        len(q),
        q.numel() + kv.numel(),
        *(each.data_ptr() for each in tensors),
        *(q.shape[1], q.shape[2], width, len(norm), block_size, cache.stride(0)),
        float_bits(eps),
        pairs.interleaved,
        cache.stride(1),
    )


@njit
def _token(arguments: int, i: int, element: Any) -> None:
    num_heads = argument(arguments, 7)
    head_size = argument(arguments, 8) * size_of(element)
    width = argument(arguments, 9)
    rank = argument(arguments, 10)
    block_size = argument(arguments, 11)
    rotary = width - rank
    is_interleaved = argument(arguments, 14)
    tail = rotary * size_of(element)
    p_cos_sin = argument(arguments, 4) + int64_at(argument(arguments, 2) + i * 8) * rotary * 4
    p_q = argument(arguments, 0) + i * num_heads * head_size
    for head in range(num_heads):
        p_tail = p_q + (head + 1) * head_size - tail
        rotate(p_tail, p_tail, p_cos_sin, rotary, is_interleaved, element)
    slot = int64_at(argument(arguments, 3) + i * 8)
    at = slot // block_size * argument(arguments, 12) + slot % block_size * argument(arguments, 15)
    p_latent = argument(arguments, 5) + at * size_of(element)
    p_kv = argument(arguments, 1) + i * width * size_of(element)
    _norm(arguments, p_kv, p_latent, rank, element)
    behind = rank * size_of(element)
    rotate(p_kv + behind, p_latent + behind, p_cos_sin, rotary, is_interleaved, element)


@njit
def _norm(arguments: int, p_x: int, p_out: int, rank: int, element: Any) -> None:
    squares = splat(F32(0))
    size = rank * size_of(element)
    step = NUM_LANES * size_of(element)
    for at in range(0, size, step):
        x = load(p_x + at, element)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, 13))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(rank) + eps))
    p_weight = argument(arguments, 6)
    for at in range(0, size, step):
        x = mul(load(p_x + at, element), scale)
        store(p_out + at, mul(x, load(p_weight + at, element)), element)


@njit
def rotate(
    p_x: int, p_out: int, p_cos_sin: int, rotary: int, is_interleaved: int, element: Any
) -> None:
    """Writes the rotated numbers of p_x [rotary] to p_out, which may be the same."""
    # Numbers are processed one at a time: half of what rotates need not fill the lanes.
    half = rotary // 2
    for pair in range(half):
        low = 2 * pair if is_interleaved else pair
        high = low + (1 if is_interleaved else half)
        x = number_at(p_x + low * size_of(element), element)
        y = number_at(p_x + high * size_of(element), element)
        cos = float32_at(p_cos_sin + pair * 4)
        sin = float32_at(p_cos_sin + (half + pair) * 4)
        put(p_out + low * size_of(element), x * cos - y * sin, element)
        put(p_out + high * size_of(element), y * cos + x * sin, element)


def _tokens(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _token(arguments, i, element)

    return work


KERNEL = Kernel(_tokens(F32_ELEMENT), _tokens(BF16_ELEMENT))
