"""Norm, rotation and storing of the keys of sparse indexers in a CPU's paged cache, and rotation of
their queries. Twin: `kernels.latent.index_twin`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from ...attention.rotary_pairs import RotaryPairs
from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, int64_at, size_of
from ..compiler.simd import add, fma, load, mul, splat, store, sub, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .store_latents import rotate

MAX_DIM = 1024
"""Numbers of the widest key."""


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
    bias [D], the first numbers rotated. positions and slots int64 [T]; cos_sin float32 [positions,
    pairs.width]; all others have one dtype; D divides by 16."""
    _, num_heads, dim = q.shape
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert k.shape[1] == keys.shape[2] == dim
    assert keys.stride(2) == 1
    assert positions.dtype == slots.dtype == torch.int64
    assert cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] == pairs.width <= dim
    assert norm.dtype == bias.dtype == q.dtype == k.dtype == keys.dtype
    assert dim % NUM_LANES == 0
    assert dim <= MAX_DIM
    tensors = (q, k, positions, slots, cos_sin, keys, norm, bias)
    KERNEL(
        q.dtype,
        len(q),
        q.numel() + k.numel(),
        *(each.data_ptr() for each in tensors),
        *(num_heads, dim, pairs.width, keys.shape[1], keys.stride(0), keys.stride(1)),
        float_bits(eps),
        pairs.interleaved,
    )


@njit
def _token(arguments: int, i: int, p_normed: int, element: Any) -> None:
    num_heads = argument(arguments, 8)
    dim = argument(arguments, 9)
    rotary = argument(arguments, 10)
    block_size = argument(arguments, 11)
    is_interleaved = argument(arguments, 15)
    size = size_of(element)
    p_cos_sin = argument(arguments, 4) + int64_at(argument(arguments, 2) + i * 8) * rotary * 4
    for head in range(num_heads):
        p_head = argument(arguments, 0) + (i * num_heads + head) * dim * size
        rotate(p_head, p_head, p_cos_sin, rotary, is_interleaved, element)
    _norm(arguments, argument(arguments, 1) + i * dim * size, p_normed, dim, element)
    rotate(p_normed, p_normed, p_cos_sin, rotary, is_interleaved, F32_ELEMENT)
    slot = int64_at(argument(arguments, 3) + i * 8)
    at = slot // block_size * argument(arguments, 12) + slot % block_size * argument(arguments, 13)
    p_key = argument(arguments, 5) + at * size
    for d in range(0, dim, NUM_LANES):
        store(p_key + d * size, load(p_normed + d * 4, F32_ELEMENT), element)


@njit
def _norm(arguments: int, p_x: int, p_out: int, dim: int, element: Any) -> None:
    size = size_of(element)
    total = splat(F32(0))
    for d in range(0, dim, NUM_LANES):
        total = add(total, load(p_x + d * size, element))
    mean = splat(sum_of(total) / F32(dim))
    squares = splat(F32(0))
    for d in range(0, dim, NUM_LANES):
        x = sub(load(p_x + d * size, element), mean)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, 14))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(dim) + eps))
    for d in range(0, dim, NUM_LANES):
        x = mul(sub(load(p_x + d * size, element), mean), scale)
        factors = load(argument(arguments, 6) + d * size, element)
        x = fma(x, factors, load(argument(arguments, 7) + d * size, element))
        store(p_out + d * 4, x, F32_ELEMENT)


def _tokens(element: Any) -> Any:
    def work(arguments: int) -> None:
        normed = np.empty(MAX_DIM, np.float32)
        for i in items(arguments):
            _token(arguments, i, normed.ctypes.data, element)

    return work


KERNEL = Kernel(_tokens(F32_ELEMENT), _tokens(BF16_ELEMENT))
