"""One token of a gated delta net, on a CPU: its convolution, gates and norms."""

from __future__ import annotations

import math
from typing import Any

from numba import njit

from ...delta.delta_twin import L2_EPS
from ...delta.delta_unit import CONV_WIDTH, NUM_BEFORE
from ..compiler.compiled import address_of, argument
from ..compiler.scalars import float32_at, number_at, put, size_of
from ..compiler.simd import add, div, fma, highest_of, load, mul, splat, store, sub, sum_of
from ..compiler.simd_math import exp, log
from ..compiler.simd_types import F32, F32_ELEMENT, NUM_LANES
from ..states import rows
from . import places
from .scratch import at_mixed, at_sums, at_zeros, num_channels


@njit
def _inputs_of(
    arguments: int, p_scratch: int, i: int, position: int, part: int, element: Any
) -> Any:
    """Address of a token's raw query, key or values (part 0, 1, 2): in the batch, in the tail of
    the first block, or zeros before the sequence."""
    row = i // argument(arguments, rows.NUM_UNITS)
    head = i % argument(arguments, rows.NUM_UNITS)
    start = rows.number_of(arguments, rows.STARTS, row)
    if position >= start:
        token = rows.number_of(arguments, rows.TOKENS, row) + position - start
        first = places.QUERY + 2 * part
        at = argument(arguments, first) + head * argument(arguments, first + 1)
        return argument(arguments, places.WIDE) + (
            token * argument(arguments, places.WIDE_STRIDE) + at
        ) * size_of(element)
    if position < 0:
        return at_zeros(arguments, p_scratch)
    block_size = argument(arguments, places.BLOCK_SIZE)
    place = NUM_BEFORE + position - start // block_size * block_size
    at = place * num_channels(arguments) + part * argument(arguments, places.KEY_DIM)
    return rows.tail_of(arguments, rows.FIRST, row, head) + at * size_of(element)


@njit
def _size_of_part(arguments: int, part: int) -> Any:
    values = argument(arguments, places.NUM_VALUES) * argument(arguments, places.VALUE_DIM)
    return values if part == 2 else argument(arguments, places.KEY_DIM)


@njit
def keep_inputs(
    arguments: int,
    p_scratch: int,
    i: int,
    position: int,
    p_unit: int,
    row: int,
    element: Any,
) -> None:
    """Copies a token's inputs to a row of a unit's tail."""
    p_row = p_unit + row * num_channels(arguments) * size_of(element)
    step = NUM_LANES * size_of(element)
    for part in range(3):
        p_from = _inputs_of(arguments, p_scratch, i, position, part, element)
        p_to = p_row + part * argument(arguments, places.KEY_DIM) * size_of(element)
        for d in range(0, _size_of_part(arguments, part) * size_of(element), step):
            store(p_to + d, load(p_from + d, element), element)


@njit
def mix(arguments: int, p_scratch: int, i: int, position: int, element: Any) -> None:
    """Writes the SiLU of the token's convolution."""
    head = i % argument(arguments, rows.NUM_UNITS)
    channels = num_channels(arguments)
    one = splat(F32(1))
    zero = splat(F32(0))
    for part in range(3):
        skipped = part * argument(arguments, places.KEY_DIM)
        p_taps = argument(arguments, places.TAPS) + 4 * (head * CONV_WIDTH * channels + skipped)
        p_mixed = at_mixed(arguments, p_scratch) + 4 * skipped
        p_0 = _inputs_of(arguments, p_scratch, i, position - 3, part, element)
        p_1 = _inputs_of(arguments, p_scratch, i, position - 2, part, element)
        p_2 = _inputs_of(arguments, p_scratch, i, position - 1, part, element)
        p_3 = _inputs_of(arguments, p_scratch, i, position, part, element)
        for d in range(0, _size_of_part(arguments, part), NUM_LANES):
            at = d * size_of(element)
            x = mul(load(p_0 + at, element), load(p_taps + 4 * d, F32_ELEMENT))
            x = fma(load(p_1 + at, element), load(p_taps + 4 * (channels + d), F32_ELEMENT), x)
            x = fma(load(p_2 + at, element), load(p_taps + 4 * (2 * channels + d), F32_ELEMENT), x)
            x = fma(load(p_3 + at, element), load(p_taps + 4 * (3 * channels + d), F32_ELEMENT), x)
            store(p_mixed + 4 * d, div(x, add(one, exp(sub(zero, x)))), F32_ELEMENT)


@njit
def normalize(arguments: int, p_scratch: int, p_keys: int, at: int) -> None:
    """Scales the mixed query to its length, and writes the key of that length to its row."""
    key_dim = argument(arguments, places.KEY_DIM)
    p_query = at_mixed(arguments, p_scratch)
    p_key = p_query + 4 * key_dim
    scale = splat(
        float32_at(address_of(arguments, places.SCALE)) * _one_over_length(p_query, key_dim)
    )
    for d in range(0, key_dim, NUM_LANES):
        store(p_query + 4 * d, mul(load(p_query + 4 * d, F32_ELEMENT), scale), F32_ELEMENT)
    scale = splat(_one_over_length(p_key, key_dim))
    for d in range(0, key_dim, NUM_LANES):
        key = mul(load(p_key + 4 * d, F32_ELEMENT), scale)
        store(p_keys + 4 * (at * key_dim + d), key, F32_ELEMENT)


@njit
def _one_over_length(p: int, size: int) -> Any:
    squares = splat(F32(0))
    for d in range(0, size, NUM_LANES):
        x = load(p + 4 * d, F32_ELEMENT)
        squares = fma(x, x, squares)
    return F32(1) / math.sqrt(sum_of(squares) + F32(L2_EPS))


@njit
def gate(
    arguments: int, p_scratch: int, token: int, head: int, p_gates: int, at: int, element: Any
) -> None:
    """Writes the logarithm of each value head's decay, its sum since the border, and the share of
    the update."""
    num_values = argument(arguments, places.NUM_VALUES)
    p_row = argument(arguments, places.NARROW) + token * argument(
        arguments, places.NARROW_STRIDE
    ) * size_of(element)
    decays = argument(arguments, places.DECAY) + head * argument(arguments, places.DECAY + 1)
    shares = argument(arguments, places.SHARE) + head * argument(arguments, places.SHARE + 1)
    for value in range(num_values):
        own = 4 * (head * num_values + value)
        x = number_at(p_row + (decays + value) * size_of(element), element)
        x = x + float32_at(argument(arguments, places.BIASES) + own)
        decay = -float32_at(argument(arguments, places.RATES) + own) * _softplus(x)
        b = number_at(p_row + (shares + value) * size_of(element), element)
        share = F32(1) / (F32(1) + highest_of(exp(splat(-b))))
        p_gate = p_gates + 8 * (at * num_values + value)
        put(p_gate, decay, F32_ELEMENT)
        put(p_gate + 4, share, F32_ELEMENT)
        add_decay(arguments, p_scratch, value, at, decay)


@njit
def _softplus(x: Any) -> Any:
    """log(1 + exp(x)), of small results exact in proportion."""
    if x > F32(20):
        return x
    y = highest_of(exp(splat(x)))
    u = F32(1) + y
    return y if u == F32(1) else highest_of(log(splat(u))) * (y / (u - F32(1)))


@njit
def add_decay(arguments: int, p_scratch: int, value: int, at: int, decay: Any) -> None:
    """Adds a token's decay to the sum of those before it."""
    p_sum = at_sums(arguments, p_scratch) + 4 * (
        value * argument(arguments, places.BLOCK_SIZE) + at
    )
    before = float32_at(p_sum - 4) if at else F32(0)
    put(p_sum, before + decay, F32_ELEMENT)


@njit
def sum_decays(arguments: int, p_scratch: int, p_gates: int, count: int) -> None:
    """Sums the decays of the block's tokens that an earlier pass has computed."""
    num_values = argument(arguments, places.NUM_VALUES)
    for at in range(count):
        for value in range(num_values):
            decay = float32_at(p_gates + 8 * (at * num_values + value))
            add_decay(arguments, p_scratch, value, at, decay)


@njit
def norm(arguments: int, p_scratch: int, token: int, head: int, value: int, element: Any) -> None:
    """Writes the norm of a value head's output times the SiLU of its gate."""
    value_dim = argument(arguments, places.VALUE_DIM)
    width = argument(arguments, places.NUM_VALUES) * value_dim
    p_x = at_mixed(arguments, p_scratch) + 4 * (
        2 * argument(arguments, places.KEY_DIM) + value * value_dim
    )
    at = (
        argument(arguments, places.Z) + head * argument(arguments, places.Z + 1) + value * value_dim
    )
    p_z = argument(arguments, places.WIDE) + (
        token * argument(arguments, places.WIDE_STRIDE) + at
    ) * size_of(element)
    at = (token * argument(arguments, rows.NUM_UNITS) + head) * width + value * value_dim
    p_out = argument(arguments, places.OUT) + at * size_of(element)
    squares = splat(F32(0))
    for d in range(0, value_dim, NUM_LANES):
        x = load(p_x + 4 * d, F32_ELEMENT)
        squares = fma(x, x, squares)
    eps = float32_at(address_of(arguments, places.EPS))
    scale = splat(F32(1) / math.sqrt(sum_of(squares) / F32(value_dim) + eps))
    one = splat(F32(1))
    zero = splat(F32(0))
    for d in range(0, value_dim, NUM_LANES):
        z = load(p_z + d * size_of(element), element)
        gate = div(z, add(one, exp(sub(zero, z))))
        weight = load(argument(arguments, places.NORM) + 4 * d, F32_ELEMENT)
        x = mul(mul(load(p_x + 4 * d, F32_ELEMENT), scale), weight)
        store(p_out + d * size_of(element), mul(x, gate), element)
