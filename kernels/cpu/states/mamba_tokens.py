"""One token of a Mamba-2 layer, on a CPU: its convolution, steps and gates, and a thread's scratch.

The scratch has, as float32 numbers or elements in their place: a ring [width, channels] of the
inputs of the last tokens, each at its position's remainder; mixed inputs [channels]; sums of
logarithms of decays [heads, block_size]; weights, and decays up to a token of a head, [block_size,
NUM_LANES] each; decays, keys and values of a block that is in no page; a state; and, as int64,
addresses of the pieces of three states: those at the first and the last border, and that one."""

from __future__ import annotations

from typing import Any

from numba import njit

from ..compiler.compiled import argument
from ..compiler.scalars import float32_at, number_at, put, size_of
from ..compiler.simd import add, div, fma, highest_of, load, mul, splat, store, sub
from ..compiler.simd_math import exp, log
from ..compiler.simd_types import F32, F32_ELEMENT, NUM_LANES
from . import mamba_places as places
from . import rows


@njit
def values_size(arguments: int) -> Any:
    """Numbers of the values of a unit."""
    return argument(arguments, places.NUM_HEADS) * argument(arguments, places.HEAD_DIM)


@njit
def num_channels(arguments: int) -> Any:
    """Channels of a unit: values, the key and the query."""
    return values_size(arguments) + 2 * argument(arguments, places.STATE_DIM)


@njit
def at_mixed(arguments: int, p_scratch: int) -> Any:
    return p_scratch + 4 * argument(arguments, places.WIDTH) * num_channels(arguments)


@njit
def _at_sums(arguments: int, p_scratch: int) -> Any:
    return at_mixed(arguments, p_scratch) + 4 * num_channels(arguments)


@njit
def at_weights(arguments: int, p_scratch: int) -> Any:
    size = argument(arguments, places.NUM_HEADS) * argument(arguments, places.BLOCK_SIZE)
    return _at_sums(arguments, p_scratch) + 4 * size


@njit
def at_left(arguments: int, p_scratch: int, j: int) -> Any:
    """Address of what is left of the block's j-th token, in every lane; see `decay_weights`."""
    place = NUM_LANES * (argument(arguments, places.BLOCK_SIZE) + j)
    return at_weights(arguments, p_scratch) + 4 * place


@njit
def at_block(arguments: int, p_scratch: int) -> Any:
    """Decays, keys and values of a block."""
    block_size = argument(arguments, places.BLOCK_SIZE)
    p_decays = at_weights(arguments, p_scratch) + 8 * NUM_LANES * block_size
    p_keys = p_decays + 4 * block_size * argument(arguments, places.NUM_HEADS)
    p_values = p_keys + 4 * block_size * argument(arguments, places.STATE_DIM)
    return p_decays, p_keys, p_values


@njit
def _at_state(arguments: int, p_scratch: int) -> Any:
    _, _, p_values = at_block(arguments, p_scratch)
    return p_values + 4 * argument(arguments, places.BLOCK_SIZE) * values_size(arguments)


@njit
def scratch_size(arguments: int) -> Any:
    """Numbers of a thread's scratch."""
    return _at_pieces(arguments, 0) // 4 + 6 * _num_pieces(arguments)


@njit
def _num_pieces(arguments: int) -> Any:
    """Pieces of a state."""
    return values_size(arguments) // argument(arguments, places.COLUMNS)


@njit
def _at_pieces(arguments: int, p_scratch: int) -> Any:
    size = values_size(arguments) * argument(arguments, places.STATE_DIM)
    return _at_state(arguments, p_scratch) + 4 * size


@njit
def pieces_of(arguments: int, p_scratch: int, row: int, unit: int) -> Any:
    """Addresses of the pieces of a row's states at its first and its last border: where they are
    written."""
    count = _num_pieces(arguments)
    p_first = _at_pieces(arguments, p_scratch)
    p_last = p_first + 8 * count
    rows.find_pieces(arguments, rows.FIRST, row, unit, p_first, count)
    rows.find_pieces(arguments, rows.LAST, row, unit, p_last, count)
    return p_first, p_last


@njit
def own_pieces(arguments: int, p_scratch: int) -> Any:
    """Addresses of the pieces of the scratch's state: where they are written."""
    count = _num_pieces(arguments)
    p_pieces = _at_pieces(arguments, p_scratch) + 16 * count
    size = argument(arguments, places.COLUMNS) * argument(arguments, places.STATE_DIM)
    rows.put_pieces(_at_state(arguments, p_scratch), p_pieces, count, 4 * size)
    return p_pieces


@njit
def of_head(arguments: int, table: int, unit: int, head: int) -> Any:
    """Address of a head's number in a table of weights."""
    return argument(arguments, table) + 4 * (unit * argument(arguments, places.NUM_HEADS) + head)


@njit
def sum_at(arguments: int, p_scratch: int, head: int, at: int) -> Any:
    """Sum of a head's decays from the border up to the `at`-th token of the block."""
    place = head * argument(arguments, places.BLOCK_SIZE) + at
    return float32_at(_at_sums(arguments, p_scratch) + 4 * place)


@njit
def _add_decay(arguments: int, p_scratch: int, head: int, at: int, decay: Any) -> None:
    place = head * argument(arguments, places.BLOCK_SIZE) + at
    p_sum = _at_sums(arguments, p_scratch) + 4 * place
    put(p_sum, (float32_at(p_sum - 4) if at else F32(0)) + decay, F32_ELEMENT)


@njit
def sum_decays(arguments: int, p_scratch: int, p_decays: int, count: int) -> None:
    """Sums the decays of the block's tokens that an earlier pass has computed."""
    num_heads = argument(arguments, places.NUM_HEADS)
    for at in range(count):
        for head in range(num_heads):
            decay = float32_at(p_decays + 4 * (at * num_heads + head))
            _add_decay(arguments, p_scratch, head, at, decay)


@njit
def decay_weights(arguments: int, p_scratch: int, head: int, at: int) -> None:
    """Writes what is left of the block's tokens at its `at`-th one, for a head."""
    total = sum_at(arguments, p_scratch, head, at)
    for j in range(at + 1):
        left = exp(splat(total - sum_at(arguments, p_scratch, head, j)))
        store(at_left(arguments, p_scratch, j), left, F32_ELEMENT)


@njit
def _ring(arguments: int, p_scratch: int, position: int, element: Any) -> Any:
    """Address of a position's inputs in the ring."""
    width = argument(arguments, places.WIDTH)
    place = (position + width) % width
    return p_scratch + place * num_channels(arguments) * size_of(element)


@njit
def begin(arguments: int, p_scratch: int, p_first: int, start: int, element: Any) -> None:
    """Puts the inputs before the row's first token into the ring: those of its state, and zeros
    before the sequence."""
    channels = num_channels(arguments)
    width = argument(arguments, places.WIDTH)
    block_size = argument(arguments, places.BLOCK_SIZE)
    for back in range(1, width):
        position = start - back
        p_row = _ring(arguments, p_scratch, position, element)
        if position < 0:
            for d in range(0, channels, NUM_LANES):
                store(p_row + d * size_of(element), splat(F32(0)), element)
        else:
            kept = width - 1 + position - start // block_size * block_size
            rows.copy(p_first + kept * channels * size_of(element), p_row, channels, element)


@njit
def keep_inputs(
    arguments: int, p_scratch: int, position: int, p_unit: int, at: int, element: Any
) -> None:
    """Copies a token's inputs to the tail of the unit of its block."""
    channels = num_channels(arguments)
    row = argument(arguments, places.WIDTH) - 1 + at
    p_row = p_unit + row * channels * size_of(element)
    rows.copy(_ring(arguments, p_scratch, position, element), p_row, channels, element)


@njit
def keep_before(arguments: int, p_scratch: int, border: int, p_unit: int, element: Any) -> None:
    """Copies the inputs before a border to the beginning of the tail behind it."""
    channels = num_channels(arguments)
    width = argument(arguments, places.WIDTH)
    for back in range(1, width):
        p_row = p_unit + (width - 1 - back) * channels * size_of(element)
        rows.copy(_ring(arguments, p_scratch, border - back, element), p_row, channels, element)


@njit
def _column_of(arguments: int, unit: int, part: int) -> Any:
    """First channel, among the layer's, of a unit's values, of its key or of its query (part 0, 1,
    2)."""
    width = values_size(arguments)
    if part == 0:
        return unit * width
    num_groups = argument(arguments, places.NUM_GROUPS)
    num_units = argument(arguments, rows.NUM_UNITS)
    key = (part - 1) * num_groups + unit * num_groups // num_units
    return num_units * width + key * argument(arguments, places.STATE_DIM)


@njit
def _num_all_channels(arguments: int) -> Any:
    """Channels of the layer: values of all units, keys and queries of all groups."""
    num_keys = 2 * argument(arguments, places.NUM_GROUPS)
    return argument(arguments, rows.NUM_UNITS) * values_size(arguments) + num_keys * argument(
        arguments, places.STATE_DIM
    )


@njit
def mix(arguments: int, p_scratch: int, position: int, token: int, unit: int, element: Any) -> None:
    """Puts a token's inputs into the ring, and writes the SiLU of their convolution."""
    size = size_of(element)
    width = argument(arguments, places.WIDTH)
    own_values = values_size(arguments)
    all_values = argument(arguments, rows.NUM_UNITS) * own_values
    all_channels = _num_all_channels(arguments)
    p_token = argument(arguments, places.PARTS) + size * (
        token * argument(arguments, places.PARTS_STRIDE) + all_values
    )
    p_ring = _ring(arguments, p_scratch, position, element)
    p_mixed = at_mixed(arguments, p_scratch)
    one = splat(F32(1))
    zero = splat(F32(0))
    place = 0
    for part in range(3):
        column = _column_of(arguments, unit, part)
        count = own_values if part == 0 else argument(arguments, places.STATE_DIM)
        rows.copy(p_token + column * size, p_ring + place * size, count, element)
        for d in range(0, count, NUM_LANES):
            x = load(argument(arguments, places.BIAS) + 4 * (column + d), F32_ELEMENT)
            for tap in range(width):
                p_row = _ring(arguments, p_scratch, position + 1 + tap, element)
                p_tap = argument(arguments, places.TAPS) + 4 * (tap * all_channels + column + d)
                own = load(p_row + (place + d) * size, element)
                x = fma(own, load(p_tap, F32_ELEMENT), x)
            x = div(x, add(one, exp(sub(zero, x))))
            store(p_mixed + 4 * (place + d), x, F32_ELEMENT)
        place += count


@njit
def _softplus(x: Any) -> Any:
    """log(1 + exp(x)), of small results exact in proportion."""
    if x > F32(20):
        return x
    y = highest_of(exp(splat(x)))
    u = F32(1) + y
    return y if u == F32(1) else highest_of(log(splat(u))) * (y / (u - F32(1)))


@njit
def step(
    arguments: int, p_scratch: int, p_block: Any, token: int, unit: int, at: int, element: Any
) -> None:
    """Writes a token's decays, key and values, times the steps of their heads, to its block."""
    p_decays, p_keys, p_values = p_block
    num_heads = argument(arguments, places.NUM_HEADS)
    head_dim = argument(arguments, places.HEAD_DIM)
    state_dim = argument(arguments, places.STATE_DIM)
    width = values_size(arguments)
    all_values = argument(arguments, rows.NUM_UNITS) * width
    first = all_values + _num_all_channels(arguments) + unit * num_heads
    p_steps = argument(arguments, places.PARTS) + size_of(element) * (
        token * argument(arguments, places.PARTS_STRIDE) + first
    )
    p_mixed = at_mixed(arguments, p_scratch)
    for head in range(num_heads):
        x = number_at(p_steps + head * size_of(element), element)
        own = _softplus(x + float32_at(of_head(arguments, places.STEP_BIASES, unit, head)))
        decay = -float32_at(of_head(arguments, places.RATES, unit, head)) * own
        put(p_decays + 4 * (at * num_heads + head), decay, F32_ELEMENT)
        _add_decay(arguments, p_scratch, head, at, decay)
        for p in range(0, head_dim, NUM_LANES):
            column = head * head_dim + p
            value = mul(load(p_mixed + 4 * column, F32_ELEMENT), splat(own))
            store(p_values + 4 * (at * width + column), value, F32_ELEMENT)
    rows.copy(p_mixed + 4 * width, p_keys + 4 * at * state_dim, state_dim, F32_ELEMENT)


@njit
def put_gated(arguments: int, token: int, unit: int, column: int, out: Any, element: Any) -> None:
    """Writes sixteen outputs of a unit times the SiLU of their gates."""
    width = values_size(arguments)
    all_values = argument(arguments, rows.NUM_UNITS) * width
    own = unit * width + column
    p_token = argument(arguments, places.PARTS)
    p_gate = p_token + size_of(element) * (token * argument(arguments, places.PARTS_STRIDE) + own)
    gate = load(p_gate, element)
    gate = div(gate, add(splat(F32(1)), exp(sub(splat(F32(0)), gate))))
    p_out = argument(arguments, places.OUT) + size_of(element) * (token * all_values + own)
    store(p_out, mul(out, gate), element)
