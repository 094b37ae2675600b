"""Products of the heads of tokens with a matrix for each head, on a CPU: from queries to queries
over latents, and from latents that a head attended to, to its values.

A row's sum has one order, whatever rows are beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import number_at, put, size_of
from ..compiler.simd import add, fma, load, splat, store, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .latent_attention import MAX_WIDTH

ROWS = 8
"""Number of tokens in an item of work, which has one head."""
_INPUTS = 4
"""Inputs of a product that are added one after another to a sum in a register."""


def absorbed_queries(q: torch.Tensor, kv_b: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """Queries q [E, Hq, D], contiguous, of D - (width - rank) numbers without a position and
    width - rank with one → [E, Hq, width]: the first ones times W_UK, then the others. kv_b [Hq,
    numbers without a position + value, rank], contiguous, begins with W_UK of each head. Sizes
    divide by 16."""
    num_rows, num_heads, head_dim = q.shape
    plain = head_dim - (width - rank)
    assert q.is_contiguous()
    assert kv_b.is_contiguous()
    assert q.dtype == kv_b.dtype
    assert plain % NUM_LANES == rank % NUM_LANES == width % NUM_LANES == 0
    out = q.new_empty(num_rows, num_heads, width)
    ABSORB(
        q.dtype,
        num_heads * -(-num_rows // ROWS),
        num_heads * num_rows * plain * rank,
        *(q.data_ptr(), kv_b.data_ptr(), out.data_ptr()),
        *(num_rows, num_heads, head_dim, width, rank, kv_b.shape[1], plain),
    )
    return out


def head_values(attended: torch.Tensor, kv_b: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Latents that heads attended to [E, Hq, rank], contiguous, times W_UV, the last `value_dim`
    rows of each head of kv_b [Hq, D, rank], contiguous → [E, Hq · value_dim]. Sizes divide by
    16."""
    num_rows, num_heads, rank = attended.shape
    assert attended.is_contiguous()
    assert kv_b.is_contiguous()
    assert attended.dtype == kv_b.dtype
    assert value_dim % 2 == rank % NUM_LANES == 0
    out = attended.new_empty(num_rows, num_heads * value_dim)
    VALUES(
        attended.dtype,
        num_heads * -(-num_rows // ROWS),
        num_heads * num_rows * value_dim * rank,
        *(attended.data_ptr(), kv_b.data_ptr(), out.data_ptr()),
        *(num_rows, num_heads, rank, kv_b.shape[1], value_dim),
    )
    return out


@njit
def _absorb(arguments: int, i: int, p_sums: int, element: Any) -> None:
    """One head of some rows. `p_sums` float32 [ROWS, MAX_WIDTH]."""
    size = size_of(element)
    num_heads = argument(arguments, 4)
    head_dim = argument(arguments, 5)
    width = argument(arguments, 6)
    rank = argument(arguments, 7)
    plain = argument(arguments, 9)
    head = i % num_heads
    first = i // num_heads * ROWS
    num_rows = min(ROWS, argument(arguments, 3) - first)
    q_stride = num_heads * head_dim * size
    p_q = argument(arguments, 0) + (first * num_heads + head) * head_dim * size
    p_weight = argument(arguments, 1) + head * argument(arguments, 8) * rank * size
    for row in range(num_rows):
        for n in range(0, rank, NUM_LANES):
            store(p_sums + (row * MAX_WIDTH + n) * 4, splat(F32(0)), F32_ELEMENT)
    for k in range(0, plain, _INPUTS):
        p_k = p_weight + k * rank * size
        for row in range(num_rows):
            p_x = p_q + row * q_stride + k * size
            x_0 = splat(number_at(p_x, element))
            x_1 = splat(number_at(p_x + size, element))
            x_2 = splat(number_at(p_x + 2 * size, element))
            x_3 = splat(number_at(p_x + 3 * size, element))
            for n in range(0, rank, NUM_LANES):
                p_sum = p_sums + (row * MAX_WIDTH + n) * 4
                p = p_k + n * size
                total = fma(x_0, load(p, element), load(p_sum, F32_ELEMENT))
                total = fma(x_1, load(p + rank * size, element), total)
                total = fma(x_2, load(p + 2 * rank * size, element), total)
                total = fma(x_3, load(p + 3 * rank * size, element), total)
                store(p_sum, total, F32_ELEMENT)
    for row in range(num_rows):
        p_out = argument(arguments, 2) + ((first + row) * num_heads + head) * width * size
        for n in range(0, rank, NUM_LANES):
            store(p_out + n * size, load(p_sums + (row * MAX_WIDTH + n) * 4, F32_ELEMENT), element)
        p_tail = p_q + row * q_stride + plain * size
        for n in range(0, width - rank, NUM_LANES):
            store(p_out + (rank + n) * size, load(p_tail + n * size, element), element)


@njit
def _values(arguments: int, i: int, element: Any) -> None:
    """One head of some rows."""
    size = size_of(element)
    num_heads = argument(arguments, 4)
    rank = argument(arguments, 5)
    value_dim = argument(arguments, 7)
    head = i % num_heads
    first = i // num_heads * ROWS
    num_rows = min(ROWS, argument(arguments, 3) - first)
    behind = argument(arguments, 6) - value_dim
    p_weight = argument(arguments, 1) + (head * argument(arguments, 6) + behind) * rank * size
    for v in range(0, value_dim, 2):
        p_low = p_weight + v * rank * size
        p_high = p_low + rank * size
        for row in range(first, first + num_rows):
            p_x = argument(arguments, 0) + (row * num_heads + head) * rank * size
            low_0 = low_1 = high_0 = high_1 = splat(F32(0))
            for d in range(0, rank, 2 * NUM_LANES):
                x = load(p_x + d * size, element)
                low_0 = fma(x, load(p_low + d * size, element), low_0)
                high_0 = fma(x, load(p_high + d * size, element), high_0)
                if d + NUM_LANES < rank:
                    at = (d + NUM_LANES) * size
                    x = load(p_x + at, element)
                    low_1 = fma(x, load(p_low + at, element), low_1)
                    high_1 = fma(x, load(p_high + at, element), high_1)
            p_out = argument(arguments, 2) + ((row * num_heads + head) * value_dim + v) * size
            put(p_out, sum_of(add(low_0, low_1)), element)
            put(p_out + size, sum_of(add(high_0, high_1)), element)


def _absorbing(element: Any) -> Any:
    def work(arguments: int) -> None:
        sums = np.empty(ROWS * MAX_WIDTH, np.float32)
        for i in items(arguments):
            _absorb(arguments, i, sums.ctypes.data, element)

    return work


def _evaluating(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _values(arguments, i, element)

    return work


ABSORB = Kernel(_absorbing(F32_ELEMENT), _absorbing(BF16_ELEMENT))
VALUES = Kernel(_evaluating(F32_ELEMENT), _evaluating(BF16_ELEMENT))
