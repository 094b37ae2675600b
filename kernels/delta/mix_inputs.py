"""Inputs of gated delta nets, each token's by itself and the few before it: their convolution,
queries and keys of unit length, and gates. Tokens of the rows' first and last blocks are kept in
the tails of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..states.block_rows import (
    convolved,
    oldest_neighbour,
    softplus,
    span_of,
    store_rows,
    tail_address,
)
from ..states.state_memory import StateMemory
from .delta_arguments import DeltaLayer
from .delta_twin import L2_EPS
from .delta_unit import NUM_BEFORE

BEFORE = tl.constexpr(NUM_BEFORE)
_L2_EPS = tl.constexpr(L2_EPS)
TILE = 4
"""Tokens that a program takes at once; fixed, so that the layout of a reduction never depends on
the batch."""
TOKENS = 64
"""Tokens of a row that a program mixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInputs:
    """Numbers of T tokens."""

    rows: torch.Tensor
    """[T, key heads, channels of a unit] queries, keys and values."""
    gates: torch.Tensor
    """float32 [T, value heads, 2]: logarithms of decays, and shares of updates."""


def mix_inputs(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    layer: DeltaLayer,
    memory: StateMemory,
    *,
    are_neighbours: bool = False,
    dependent: bool = False,
) -> MixedInputs:
    """Both projections [T, …] of a batch → mixed inputs of its rows' tokens. `are_neighbours` and
    `dependent`: as in `delta_net`."""
    unit = layer.unit
    num_tokens = len(wide)
    num_values = layer.num_heads * unit.num_values
    mixed = MixedInputs(
        rows=wide.new_empty(num_tokens, layer.num_heads, unit.num_channels),
        gates=wide.new_empty(num_tokens, num_values, 2, dtype=torch.float32),
    )
    num_rows = len(memory.starts)
    # Where there are as many rows as tokens, each has one.
    searches = num_rows != num_tokens
    programs = num_rows + num_tokens // TOKENS if searches else num_rows
    # One program for the query, one for the key and one for each value head: loads of a single
    # token that depend on each other take all of its time, so that few follow one another.
    _mix_inputs[(programs, layer.num_heads * (2 + unit.num_values))](
        wide,
        narrow,
        layer.conv,
        layer.rates,
        layer.biases,
        mixed.rows,
        mixed.gates,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        num_rows,
        unit.key_dim**-0.5,
        wide.stride(0),
        narrow.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        *(layer.places.query + layer.places.key + layer.places.value),
        *(layer.places.decay + layer.places.share),
        GATES_AT=unit.gates_at,
        KEYS_AT=unit.keys_at,
        NUM_VALUES=unit.num_values,
        KEY_DIM=unit.key_dim,
        VALUE_DIM=unit.value_dim,
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        SEARCHES=searches,
        TILE=TILE,
        TOKENS=TOKENS,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )
    return mixed


@triton.jit
def mixed_rows(
    p_own,
    stride_own,
    p_taps,
    p_read,
    o_position,
    o_d,
    start,
    end,
    token,
    before,
    scale,
    CHANNELS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_INNER: tl.constexpr = False,
):
    """Inputs of queries, keys or values [positions, numbers] as of `load_inputs`, and what is mixed
    of them, both in the model's dtype. IS_SCALED: each row has the length `scale`."""
    b_x, b_mixed = convolved(
        p_own,
        stride_own,
        p_taps,
        p_read,
        tl.zeros((o_d.shape[0],), tl.float32),
        o_position,
        o_d,
        start,
        end,
        token,
        before,
        CHANNELS,
        CHANNELS,
        BEFORE,
        IS_INNER,
    )
    if IS_SCALED:
        b_mixed = b_mixed * (scale * tl.rsqrt(tl.sum(b_mixed * b_mixed, axis=1) + _L2_EPS))[:, None]
    return b_x, b_mixed.to(p_own.dtype.element_ty)


@triton.jit
def keep_rows(
    p_tail,
    p_next_tail,
    p_rows,
    p_next_rows,
    b_x,
    b_mixed,
    o_position,
    o_d,
    start,
    end,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """Keeps inputs [positions, numbers] of a row's tokens in tails of its first and its last block,
    and, if IS_KEPT, what is mixed of them."""
    is_own = o_position < end
    o_row = o_position - start // BLOCK * BLOCK
    border = end // BLOCK * BLOCK
    o_next_row = o_position - border
    is_first = is_own & (o_row < BLOCK)
    crosses = is_own & (border > start)
    # The inputs before a border too are in the tail behind it.
    is_near = crosses & (o_next_row >= -BEFORE)
    o_in = o_row + BEFORE
    o_next_in = o_next_row + BEFORE
    store_rows(p_tail, p_next_tail, b_x, o_in, o_next_in, o_d, is_first, is_near, CHANNELS)
    if IS_KEPT:
        is_last = crosses & (o_next_row >= 0)
        SIZE: tl.constexpr = o_d.shape[0]
        store_rows(p_rows, p_next_rows, b_mixed, o_row, o_next_row, o_d, is_first, is_last, SIZE)


@triton.jit
def _mix(
    p_own,
    stride_own,
    p_taps,
    p_read,
    p_to,
    p_tail,
    p_next_tail,
    p_rows,
    p_next_rows,
    o_position,
    o_d,
    start,
    end,
    first_read,
    read_start,
    read_before,
    scale,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_KEPT: tl.constexpr,
    IS_INNER: tl.constexpr,
):
    """Mixes queries, keys or values of tokens [positions] and stores them; keeps their inputs, and
    keys, in tails of the first and the last block. IS_INNER: there are none of these to keep."""
    b_x, b_mixed = mixed_rows(
        p_own,
        stride_own,
        p_taps,
        p_read,
        o_position,
        o_d,
        read_start,
        end,
        first_read,
        read_before,
        scale,
        CHANNELS,
        IS_SCALED,
        IS_INNER,
    )
    if IS_INNER:
        tl.store(p_to + o_d[None, :], b_mixed)
        return
    tl.store(p_to + o_d[None, :], b_mixed, mask=(o_position < end)[:, None])
    keep_rows(
        p_tail,
        p_next_tail,
        p_rows,
        p_next_rows,
        b_x,
        b_mixed,
        o_position,
        o_d,
        start,
        end,
        BLOCK,
        CHANNELS,
        IS_KEPT,
    )


@triton.jit
def store_gates(p_gate, b_decay, b_share, is_stored):
    tl.store(p_gate, b_decay, mask=is_stored)
    tl.store(p_gate + 1, b_share, mask=is_stored)


@triton.jit
def gates_of(p_row, decay_column, share_column, rate, bias, is_own):
    """Logarithms of decays, and shares of updates."""
    b_a = tl.load(p_row + decay_column, mask=is_own, other=0.0).to(tl.float32) + bias
    b_b = tl.load(p_row + share_column, mask=is_own, other=0.0).to(tl.float32)
    return -rate * softplus(b_a), 1 / (1 + tl.exp(-b_b))


@triton.jit
def _mix_tile(
    p_query,
    p_key,
    p_value,
    p_narrow,
    p_rates,
    p_biases,
    p_taps,
    p_rows,
    p_gates,
    p_read,
    p_tail,
    p_next_tail,
    p_keys,
    p_next_keys,
    p_kept_gates,
    p_next_gates,
    first,
    start,
    end,
    token,
    oldest,
    first_read,
    read_before,
    scale,
    i_head,
    i_part,
    num_heads,
    stride_wide,
    stride_narrow,
    decay_first,
    decay_stride,
    share_first,
    share_stride,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_INNER: tl.constexpr,
):
    """Mixes a part of one key head, of TILE tokens from `first` on."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    before = start // BLOCK * BLOCK
    border = end // BLOCK * BLOCK
    o_k = tl.arange(0, KEY_DIM)
    o_v = tl.arange(0, VALUE_DIM)
    o_position = first + tl.arange(0, TILE)
    is_own = o_position < end
    o_token = (token + o_position - start).to(tl.int64)
    p_to = p_rows + (o_token[:, None] * num_heads + i_head) * CHANNELS
    for part in tl.static_range(2):
        # Queries are scaled, and of no use to later tokens.
        column = part * KEY_DIM
        if i_part == part:
            _mix(
                p_query if part == 0 else p_key,
                stride_wide,
                p_taps + column,
                p_read + column,
                p_to + column,
                p_tail + column,
                p_next_tail + column,
                p_keys,
                p_next_keys,
                o_position,
                o_k,
                start,
                end,
                first_read,
                oldest,
                read_before,
                scale if part == 0 else 1.0,
                BLOCK,
                CHANNELS,
                True,
                part == 1,
                IS_INNER,
            )
    for value in tl.static_range(NUM_VALUES):
        column = 2 * KEY_DIM + value * VALUE_DIM
        if i_part == 2 + value:
            _mix(
                p_value + value * VALUE_DIM,
                stride_wide,
                p_taps + column,
                p_read + column,
                p_to + column,
                p_tail + column,
                p_next_tail + column,
                p_keys,
                p_next_keys,
                o_position,
                o_v,
                start,
                end,
                first_read,
                oldest,
                read_before,
                1.0,
                BLOCK,
                CHANNELS,
                False,
                False,
                IS_INNER,
            )
            b_decay, b_share = gates_of(
                p_narrow + o_token * stride_narrow,
                decay_first + i_head * decay_stride + value,
                share_first + i_head * share_stride + value,
                tl.load(p_rates + i_head * NUM_VALUES + value),
                tl.load(p_biases + i_head * NUM_VALUES + value),
                is_own,
            )
            o_gate = (o_token * num_heads + i_head) * NUM_VALUES + value
            store_gates(p_gates + 2 * o_gate, b_decay, b_share, is_own)
            if not IS_INNER:
                p_gate = p_kept_gates + 2 * ((o_position - before) * NUM_VALUES + value)
                store_gates(p_gate, b_decay, b_share, is_own & (o_position < before + BLOCK))
                p_gate = p_next_gates + 2 * ((o_position - border) * NUM_VALUES + value)
                is_last = is_own & (o_position >= border) & (border > before)
                store_gates(p_gate, b_decay, b_share, is_last)


@triton.jit(do_not_specialize=["num_rows"])
def _mix_inputs(
    p_wide,
    p_narrow,
    p_conv,
    p_rates,
    p_biases,
    p_rows,
    p_gates,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    num_rows,
    scale,
    stride_wide,
    stride_narrow,
    stride_page,
    stride_table,
    first_unit,
    tails_per_page,
    tail_bytes,
    query_first,
    query_stride,
    key_first,
    key_stride,
    value_first,
    value_stride,
    decay_first,
    decay_stride,
    share_first,
    share_stride,
    GATES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    SEARCHES: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    PARTS: tl.constexpr = 2 + NUM_VALUES
    i_row, span, end_span = span_of(p_starts, p_ends, num_rows, TOKENS, False, SEARCHES)
    i_head = tl.program_id(1) // PARTS
    i_part = tl.program_id(1) % PARTS
    num_heads = tl.num_programs(1) // PARTS
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    if end <= start:
        return
    before = start // BLOCK * BLOCK
    border = end // BLOCK * BLOCK
    unit = first_unit + i_head
    p_unit = tail_address(
        p_pages, p_first, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    p_next = tail_address(
        p_pages, p_last, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    elements = tl.pointer_type(p_wide.dtype.element_ty)
    floats = tl.pointer_type(tl.float32)
    p_tail = p_unit.to(elements, bitcast=True)
    p_next_tail = p_next.to(elements, bitcast=True)
    p_kept_gates = (p_unit + GATES_AT).to(floats, bitcast=True)
    p_next_gates = (p_next + GATES_AT).to(floats, bitcast=True)
    p_keys = (p_unit + KEYS_AT).to(elements, bitcast=True)
    p_next_keys = (p_next + KEYS_AT).to(elements, bitcast=True)
    p_taps = p_conv + i_head * (BEFORE + 1) * CHANNELS
    p_query = p_wide + query_first + i_head * query_stride
    p_key = p_wide + key_first + i_head * key_stride
    p_value = p_wide + value_first + i_head * value_stride
    earlier, p_oldest = oldest_neighbour(
        p_pages,
        p_first,
        p_last,
        p_starts,
        p_ends,
        stride_table,
        stride_page,
        i_row,
        unit,
        tails_per_page,
        tail_bytes,
        BEFORE,
        NEIGHBOURS,
    )
    p_read = p_oldest.to(elements, bitcast=True)
    oldest = start - earlier
    first_read = token - earlier
    read_before = oldest // BLOCK * BLOCK
    num_tiles = (end - start + TILE - 1) // TILE
    end_tile = tl.minimum(num_tiles, end_span * (TOKENS // TILE))
    for tile in range(span * (TOKENS // TILE), end_tile):
        first = start + tile * TILE
        # Inner tiles read no tail and are kept in none.
        is_inner = (first >= start + BEFORE) & (first >= before + BLOCK)
        is_inner = is_inner & (first + TILE + BEFORE <= border)
        if is_inner:
            _mix_tile(
                p_query,
                p_key,
                p_value,
                p_narrow,
                p_rates,
                p_biases,
                p_taps,
                p_rows,
                p_gates,
                p_read,
                p_tail,
                p_next_tail,
                p_keys,
                p_next_keys,
                p_kept_gates,
                p_next_gates,
                first,
                start,
                end,
                token,
                oldest,
                first_read,
                read_before,
                scale,
                i_head,
                i_part,
                num_heads,
                stride_wide,
                stride_narrow,
                decay_first,
                decay_stride,
                share_first,
                share_stride,
                NUM_VALUES,
                KEY_DIM,
                VALUE_DIM,
                BLOCK,
                TILE,
                True,
            )
        else:
            _mix_tile(
                p_query,
                p_key,
                p_value,
                p_narrow,
                p_rates,
                p_biases,
                p_taps,
                p_rows,
                p_gates,
                p_read,
                p_tail,
                p_next_tail,
                p_keys,
                p_next_keys,
                p_kept_gates,
                p_next_gates,
                first,
                start,
                end,
                token,
                oldest,
                first_read,
                read_before,
                scale,
                i_head,
                i_part,
                num_heads,
                stride_wide,
                stride_narrow,
                decay_first,
                decay_stride,
                share_first,
                share_stride,
                NUM_VALUES,
                KEY_DIM,
                VALUE_DIM,
                BLOCK,
                TILE,
                False,
            )
