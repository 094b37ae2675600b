"""The running softmax of a query's scores, in functions that numba compiles."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..attention import HIDDEN, highest_so_far, put_state, total_of
from ..compiler.scalars import float32_at, put, size_of
from ..compiler.simd import (
    add,
    div,
    fma,
    highest_of,
    keep_first,
    load,
    maximum,
    mul,
    splat,
    store,
    sum_of,
)
from ..compiler.simd_math import exp
from ..compiler.simd_types import F32, F32_ELEMENT, NUM_LANES


@njit
def _highest_score(p_scores: int, count: int, p_bias: int, bias_scale: Any) -> Any:
    """Adds biases, scaled, to the first `count` scores of a row unless p_bias is 0, hides the
    scores behind them up to the next multiple of `NUM_LANES`, and returns the highest."""
    highest = splat(F32(HIDDEN))
    for at in range(0, count, NUM_LANES):
        p = p_scores + at * 4
        left = count - at
        if p_bias and left >= NUM_LANES:
            bias = load(p_bias + at * 4, F32_ELEMENT)
            store(p, fma(bias, splat(bias_scale), load(p, F32_ELEMENT)), F32_ELEMENT)
        elif p_bias:
            # Behind the last bias there may be no memory.
            for i in range(left):
                bias = float32_at(p_bias + (at + i) * 4) * bias_scale
                put(p + i * 4, float32_at(p + i * 4) + bias, F32_ELEMENT)
        if left < NUM_LANES:
            store(p, keep_first(load(p, F32_ELEMENT), left, splat(F32(HIDDEN))), F32_ELEMENT)
        highest = maximum(highest, load(p, F32_ELEMENT))
    return highest_of(highest)


@njit
def weigh_row(
    p_scores: int,
    num_padded: int,
    count: int,
    scale: Any,
    p_bias: int,
    p_sums: int,
    padded: int,
    p_state: int,
    packed: Any,
) -> None:
    """Writes the weights of the first `count` scores over them and zeros behind them, and scales
    the query's sums so far to the new highest score."""
    before = highest_so_far(p_state)
    highest = max(before, _highest_score(p_scores, count, p_bias, F32(1) / scale) * scale)
    total = splat(F32(0))
    for at in range(0, num_padded, NUM_LANES):
        weight = splat(F32(0))
        if at < count:
            score = load(p_scores + at * 4, F32_ELEMENT)
            weight = exp(fma(score, splat(scale), splat(-highest)))
            total = add(total, weight)
        store(p_scores + at * size_of(packed), weight, packed)
    change = exp(splat(before - highest))
    for d in range(0, padded, NUM_LANES):
        store(p_sums + d * 4, mul(load(p_sums + d * 4, F32_ELEMENT), change), F32_ELEMENT)
    put_state(p_state, highest, total_of(p_state) * highest_of(change) + sum_of(total))


@njit
def store_row(p_sums: int, p_state: int, p_out: int, head_dim: int, element: Any) -> None:
    """Divides a query's sums by the sum of its weights, and stores them."""
    total = splat(total_of(p_state))
    whole = head_dim // NUM_LANES * NUM_LANES
    for d in range(0, head_dim, NUM_LANES):
        x = div(load(p_sums + d * 4, F32_ELEMENT), total)
        if d < whole:
            store(p_out + d * size_of(element), x, element)
        else:
            store(p_sums + d * 4, x, F32_ELEMENT)
    for d in range(whole, head_dim):
        put(p_out + d * size_of(element), float32_at(p_sums + d * 4), element)
