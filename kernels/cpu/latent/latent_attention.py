"""Attention over a CPU's paged cache of latents, prompts and decoding alike: all heads of a token
read the same latent of each earlier token, as a key and, but for its last numbers, as a value.

Four heads of a token, or of neighbouring tokens, meet two latents at once. A row sees its latents
in the order of positions, `CHUNK` of them to a step of the running softmax, whatever rows are
beside it: a position's result has the same bits decoded, as part of a chunk and in a whole prompt.
Twin: `kernels.latent.latent_twin`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ..attention import (
    CHUNK,
    HIDDEN,
    NUM_COLUMNS,
    ROWS,
    AttentionPlan,
    begin_row,
    total_of,
    weigh,
)
from ..compiler.compiled import Kernel, address_of, argument, float_bits, items
from ..compiler.scalars import float32_at, int32_at, put, size_of
from ..compiler.simd import add, div, fma, load, mul, splat, store, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES

MAX_WIDTH = 1024
"""Numbers of the widest latent."""
_ROW_SIZE = MAX_WIDTH * 4
_SCORES_AT = 2 * ROWS * _ROW_SIZE
_STATES_AT = _SCORES_AT + ROWS * CHUNK * 4
_SCRATCH = _STATES_AT // 4 + 2 * ROWS


def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, rank: int, scale: float
) -> torch.Tensor:
    """Attention of absorbed queries q [E, Hq, width], contiguous, over cache [num_blocks,
    block_size, width] of q's dtype, in which the latents of a block lie together; block_size, width
    and rank divide by 16. Returns [E, Hq, rank]. The plan has groups of Hq. Latents that a position
    does not see may hold any finite numbers."""
    _, block_size, width = cache.shape
    num_heads = q.shape[1]
    assert q.is_contiguous()
    assert cache.stride()[1:] == (width, 1)
    assert block_size % NUM_LANES == width % NUM_LANES == rank % NUM_LANES == 0
    assert rank <= width <= MAX_WIDTH
    out = q.new_empty(len(q), num_heads, rank)
    KERNEL(
        q.dtype,
        len(plan.tiles),
        plan.num_keys * width,
        *(q.data_ptr(), cache.data_ptr(), out.data_ptr()),
        *plan.addresses,
        *(plan.block_tables.shape[1], num_heads, width, rank, block_size, cache.stride(0)),
        float_bits(scale),
    )
    return out


@njit
def _tile(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    num_heads = argument(arguments, 6)
    width = argument(arguments, 7)
    rank = argument(arguments, 8)
    size = size_of(element)
    p_tile = argument(arguments, 4) + i * NUM_COLUMNS * 4
    first_row = int32_at(p_tile) * num_heads
    start = int32_at(p_tile + 4)
    first = int32_at(p_tile + 12)
    last = min(first + ROWS, int32_at(p_tile + 8)) - 1
    p_table = argument(arguments, 3) + int32_at(p_tile + 16) * argument(arguments, 5) * 4
    scale = splat(float32_at(address_of(arguments, 11)))
    p_out = p_scratch + ROWS * _ROW_SIZE
    p_scores = p_scratch + _SCORES_AT
    for j in range(ROWS):
        # Where there are fewer rows, the last is computed again and thrown away.
        p_row = argument(arguments, 0) + (first_row + min(first + j, last)) * width * size
        for d in range(0, width, NUM_LANES):
            x = mul(load(p_row + d * size, element), scale)
            store(p_scratch + j * _ROW_SIZE + d * 4, x, F32_ELEMENT)
        for d in range(0, rank, NUM_LANES):
            store(p_out + j * _ROW_SIZE + d * 4, splat(F32(0)), F32_ELEMENT)
        begin_row(p_scratch + _STATES_AT + j * 8)
    num_keys = start + last // num_heads + 1
    for key in range(0, num_keys, CHUNK):
        count = min(CHUNK, num_keys - key)
        _score(arguments, p_table, key, count, p_scratch, element)
        for j in range(ROWS):
            num_seen = min(start + min(first + j, last) // num_heads + 1 - key, count)
            p_own = p_scores + j * CHUNK * 4
            highest = _hide(p_own, num_seen, count)
            p_state = p_scratch + _STATES_AT + j * 8
            weigh(p_own, p_out + j * _ROW_SIZE, p_state, highest, 0, count, rank)
        _add_values(arguments, p_table, key, count, p_scratch, element)
    for j in range(last - first + 1):
        p_row = argument(arguments, 2) + (first_row + first + j) * rank * size
        total = splat(total_of(p_scratch + _STATES_AT + j * 8))
        for d in range(0, rank, NUM_LANES):
            x = div(load(p_out + j * _ROW_SIZE + d * 4, F32_ELEMENT), total)
            store(p_row + d * size, x, element)


@njit
def _latents_of(arguments: int, p_table: int, key: int, element: Any) -> Any:
    """Address of the latent of a key; the others of its block follow."""
    block_size = argument(arguments, 9)
    block = int32_at(p_table + key // block_size * 4)
    at = block * argument(arguments, 10) + key % block_size * argument(arguments, 7)
    return argument(arguments, 1) + at * size_of(element)


@njit
def _score(
    arguments: int, p_table: int, key: int, count: int, p_scratch: int, element: Any
) -> None:
    """Writes the scores [ROWS, CHUNK] of a chunk's keys, two keys at a time."""
    width = argument(arguments, 7)
    size = size_of(element)
    zero = splat(F32(0))
    p_scores = p_scratch + _SCORES_AT
    for at in range(0, count, 2):
        # The second key of a pair lies in the block of the first one.
        p_low = _latents_of(arguments, p_table, key + at, element)
        p_high = p_low + width * size
        a_0 = a_1 = a_2 = a_3 = b_0 = b_1 = b_2 = b_3 = zero
        for d in range(0, width, NUM_LANES):
            low = load(p_low + d * size, element)
            high = load(p_high + d * size, element)
            p = p_scratch + d * 4
            q = load(p, F32_ELEMENT)
            a_0 = fma(q, low, a_0)
            b_0 = fma(q, high, b_0)
            q = load(p + _ROW_SIZE, F32_ELEMENT)
            a_1 = fma(q, low, a_1)
            b_1 = fma(q, high, b_1)
            q = load(p + 2 * _ROW_SIZE, F32_ELEMENT)
            a_2 = fma(q, low, a_2)
            b_2 = fma(q, high, b_2)
            q = load(p + 3 * _ROW_SIZE, F32_ELEMENT)
            a_3 = fma(q, low, a_3)
            b_3 = fma(q, high, b_3)
        p = p_scores + at * 4
        _put_pair(p, a_0, b_0)
        _put_pair(p + CHUNK * 4, a_1, b_1)
        _put_pair(p + 2 * CHUNK * 4, a_2, b_2)
        _put_pair(p + 3 * CHUNK * 4, a_3, b_3)


@njit
def _put_pair(p_scores: int, low: Any, high: Any) -> None:
    put(p_scores, sum_of(low), F32_ELEMENT)
    put(p_scores + 4, sum_of(high), F32_ELEMENT)


@njit
def _hide(p_scores: int, num_seen: int, count: int) -> Any:
    """Hides the scores that a row does not see, up to the last lane of `count`; returns the highest
    of the others."""
    highest = F32(HIDDEN)
    for at in range(num_seen):
        highest = max(highest, float32_at(p_scores + at * 4))
    for at in range(max(num_seen, 0), -(-count // NUM_LANES) * NUM_LANES):
        put(p_scores + at * 4, F32(HIDDEN), F32_ELEMENT)
    return highest


@njit
def _add_values(
    arguments: int, p_table: int, key: int, count: int, p_scratch: int, element: Any
) -> None:
    rank = argument(arguments, 8)
    stride = argument(arguments, 7) * size_of(element)
    zero = splat(F32(0))
    p_out = p_scratch + ROWS * _ROW_SIZE
    p_weights = p_scratch + _SCORES_AT
    for d in range(0, rank, NUM_LANES):
        p_o = p_out + d * 4
        a_0 = load(p_o, F32_ELEMENT)
        a_1 = load(p_o + _ROW_SIZE, F32_ELEMENT)
        a_2 = load(p_o + 2 * _ROW_SIZE, F32_ELEMENT)
        a_3 = load(p_o + 3 * _ROW_SIZE, F32_ELEMENT)
        b_0 = b_1 = b_2 = b_3 = zero
        for at in range(0, count, NUM_LANES):
            p_v = _latents_of(arguments, p_table, key + at, element) + d * size_of(element)
            for lane in range(0, min(NUM_LANES, count - at), 2):
                v = load(p_v + lane * stride, element)
                p = p_weights + (at + lane) * 4
                a_0 = fma(splat(float32_at(p)), v, a_0)
                a_1 = fma(splat(float32_at(p + CHUNK * 4)), v, a_1)
                a_2 = fma(splat(float32_at(p + CHUNK * 8)), v, a_2)
                a_3 = fma(splat(float32_at(p + CHUNK * 12)), v, a_3)
                v = load(p_v + (lane + 1) * stride, element)
                p += 4
                b_0 = fma(splat(float32_at(p)), v, b_0)
                b_1 = fma(splat(float32_at(p + CHUNK * 4)), v, b_1)
                b_2 = fma(splat(float32_at(p + CHUNK * 8)), v, b_2)
                b_3 = fma(splat(float32_at(p + CHUNK * 12)), v, b_3)
        store(p_o, add(a_0, b_0), F32_ELEMENT)
        store(p_o + _ROW_SIZE, add(a_1, b_1), F32_ELEMENT)
        store(p_o + 2 * _ROW_SIZE, add(a_2, b_2), F32_ELEMENT)
        store(p_o + 3 * _ROW_SIZE, add(a_3, b_3), F32_ELEMENT)


def _tiles(element: Any) -> Any:
    def work(arguments: int) -> None:
        scratch = np.empty(_SCRATCH, np.float32)
        for i in items(arguments):
            _tile(arguments, i, scratch.ctypes.data, element)

    return work


KERNEL = Kernel(_tiles(F32_ELEMENT), _tiles(BF16_ELEMENT))
