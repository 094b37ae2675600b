"""Inputs of Mamba-2's heads, each token's by itself and the few before it: the convolution of
values, keys and queries, decays and steps. Tokens of the rows' first and last blocks are kept in
the tails of these."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from ..states.block_rows import (
    convolved,
    floats,
    load_inputs,
    oldest_neighbour,
    softplus,
    span_of,
    store_rows,
    tail_address,
)
from ..states.state_memory import StateMemory
from .mamba_layer import MambaLayer

TILE = 16
"""Tokens that a program takes at once, of rows of several."""
MOST_CHANNELS = 128
"""Channels of a program, at most."""
TOKENS = 64
"""Tokens of a row that a program mixes, where rows have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedChannels:
    """Numbers of T tokens."""

    rows: torch.Tensor
    """[T, units, channels of a unit] values, the key and the query."""
    gates: torch.Tensor
    """float32 [T, heads, 2]: logarithms of decays, and steps."""


def mix_channels(
    parts: torch.Tensor, layer: MambaLayer, memory: StateMemory, *, are_neighbours: bool = False
) -> MixedChannels:
    """The projection [T, …] of a batch → mixed channels of its rows' tokens. `are_neighbours`: as
    in `mamba`."""
    unit = layer.unit
    num_tokens = len(parts)
    mixed = MixedChannels(
        rows=parts.new_empty(num_tokens, layer.num_units, unit.num_channels),
        gates=parts.new_empty(num_tokens, layer.num_heads, 2, dtype=torch.float32),
    )
    num_rows = len(memory.starts)
    # Where there are as many rows as tokens, each has one.
    has_tokens = num_rows == num_tokens
    programs = num_rows if has_tokens else num_rows + num_tokens // TOKENS
    channels = min(gcd(unit.values_size, unit.state_dim), MOST_CHANNELS)
    _mix_channels[(programs, layer.num_units * (unit.num_channels // channels))](
        parts,
        layer.taps,
        layer.bias,
        layer.rates,
        layer.step_biases,
        mixed.rows,
        mixed.gates,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        num_rows,
        parts.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        NUM_UNITS=layer.num_units,
        UNITS_PER_GROUP=layer.units_per_group,
        NUM_HEADS=unit.num_heads,
        HEAD_DIM=unit.head_dim,
        STATE_DIM=unit.state_dim,
        DECAYS_AT=unit.decays_at,
        KEYS_AT=unit.keys_at,
        WIDTH=unit.width,
        BEFORE_TILE=triton.next_power_of_2(unit.width - 1),
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        CHANNELS=channels,
        SEARCHES=not has_tokens,
        TOKENS=TOKENS,
        TILE=1 if has_tokens else TILE,
        num_warps=1 if has_tokens else 4,
    )
    return mixed


@triton.jit
def _tail_of(
    p_parts,
    p_unit,
    own_column,
    VALUES: tl.constexpr,
    KEYS_AT: tl.constexpr,
):
    """Addresses in a unit's tail, from a channel of the unit on: its inputs, and its keys, where
    the channel is one of the key's."""
    elements = tl.pointer_type(p_parts.dtype.element_ty)
    p_keys = (p_unit + KEYS_AT).to(elements, bitcast=True) + own_column - VALUES
    return p_unit.to(elements, bitcast=True) + own_column, p_keys


@triton.jit
def _column_of(
    i_unit,
    own_column,
    NUM_UNITS: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    STATE_DIM: tl.constexpr,
):
    """Channel of the layer that is a unit's channel: the layer has values of all units, keys of all
    groups, and queries of all groups."""
    ALL_VALUES: tl.constexpr = NUM_UNITS * VALUES
    ALL_KEYS: tl.constexpr = NUM_UNITS // UNITS_PER_GROUP * STATE_DIM
    i_of_keys = own_column - VALUES
    i_of_queries = i_of_keys - STATE_DIM
    key = ALL_VALUES + i_unit // UNITS_PER_GROUP * STATE_DIM
    column = tl.where(i_of_queries >= 0, key + ALL_KEYS + i_of_queries, key + i_of_keys)
    return tl.where(i_of_keys >= 0, column, i_unit * VALUES + own_column)


@triton.jit
def _gates(p_steps, b_rate, b_bias, o_head, is_own):
    """Logarithms of decays, and steps, of tokens [positions, heads]; p_steps [positions, 1]: where
    those of all heads begin."""
    b_step = tl.load(p_steps + o_head[None, :], mask=is_own[:, None], other=0.0)
    b_step = softplus(b_step.to(tl.float32) + b_bias[None, :])
    return -b_rate[None, :] * b_step, b_step


@triton.jit
def _copy_inputs(
    p_own,
    stride_own,
    p_read,
    p_next_tail,
    o_d,
    oldest,
    start,
    token,
    before,
    border,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_TILE: tl.constexpr,
):
    """Copies inputs of tokens before the border and before the pass to the tail behind it."""
    o_row = tl.arange(0, BEFORE_TILE)
    o_position = border - BEFORE + o_row
    b_x = load_inputs(
        p_own,
        stride_own,
        p_read,
        o_position,
        o_d,
        oldest,
        start,
        token,
        before,
        CHANNELS,
        BEFORE,
    )
    is_kept = (o_position < start) & (o_row < BEFORE)
    p_row = p_next_tail + o_row[:, None] * CHANNELS + o_d[None, :]
    tl.store(p_row, b_x, mask=is_kept[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _mix_channels(
    p_parts,
    p_taps,
    p_bias,
    p_rates,
    p_step_biases,
    p_rows,
    p_gates,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    num_rows,
    stride_part,
    stride_page,
    stride_table,
    first_unit,
    tails_per_page,
    tail_bytes,
    NUM_UNITS: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    DECAYS_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEARCHES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    BEFORE: tl.constexpr = WIDTH - 1
    VALUES: tl.constexpr = NUM_HEADS * HEAD_DIM
    OF_UNIT: tl.constexpr = VALUES + 2 * STATE_DIM
    ALL_VALUES: tl.constexpr = NUM_UNITS * VALUES
    ALL_KEYS: tl.constexpr = NUM_UNITS // UNITS_PER_GROUP * STATE_DIM
    ALL_CHANNELS: tl.constexpr = ALL_VALUES + 2 * ALL_KEYS
    PARTS: tl.constexpr = OF_UNIT // CHANNELS
    i_row, span, end_span = span_of(p_starts, p_ends, num_rows, TOKENS, False, SEARCHES)
    i_unit = tl.program_id(1) // PARTS
    own_column = tl.program_id(1) % PARTS * CHANNELS
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    if end <= start:
        return
    column = _column_of(i_unit, own_column, NUM_UNITS, UNITS_PER_GROUP, VALUES, STATE_DIM)
    before = start // BLOCK * BLOCK
    border = end // BLOCK * BLOCK
    crosses = border > before
    unit = first_unit + i_unit
    p_unit = tail_address(
        p_pages, p_first, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    p_next = tail_address(
        p_pages, p_last, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
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
    oldest = start - earlier
    first_read = token - earlier
    read_before = oldest // BLOCK * BLOCK
    p_read, _ = _tail_of(p_parts, p_oldest, own_column, VALUES, KEYS_AT)
    p_tail, p_keys = _tail_of(p_parts, p_unit, own_column, VALUES, KEYS_AT)
    p_next_tail, p_next_keys = _tail_of(p_parts, p_next, own_column, VALUES, KEYS_AT)
    p_own = p_parts + ALL_VALUES + column
    o_d = tl.arange(0, CHANNELS)
    b_bias = tl.load(p_bias + column + o_d)
    num_tiles = (end - start + TILE - 1) // TILE
    end_tile = tl.minimum(num_tiles, end_span * (TOKENS // TILE))
    for tile in range(span * (TOKENS // TILE), end_tile):
        o_position = start + tile * TILE + tl.arange(0, TILE)
        is_own = o_position < end
        o_token = (token + o_position - start).to(tl.int64)
        b_x, b_mixed = convolved(
            p_own,
            stride_part,
            p_taps + column,
            p_read,
            b_bias,
            o_position,
            o_d,
            oldest,
            end,
            first_read,
            read_before,
            ALL_CHANNELS,
            OF_UNIT,
            BEFORE,
        )
        b_mixed = b_mixed.to(p_rows.dtype.element_ty)
        p_to = p_rows + (o_token[:, None] * NUM_UNITS + i_unit) * OF_UNIT + own_column
        tl.store(p_to + o_d[None, :], b_mixed, mask=is_own[:, None])
        o_row = o_position - before
        o_next_row = o_position - border
        is_first = is_own & (o_row < BLOCK)
        is_last = is_own & crosses & (o_next_row >= 0)
        # The inputs before a border too are in the tail behind it.
        is_near = is_own & crosses & (o_next_row >= -BEFORE)
        o_in = o_row + BEFORE
        o_next_in = o_next_row + BEFORE
        store_rows(p_tail, p_next_tail, b_x, o_in, o_next_in, o_d, is_first, is_near, OF_UNIT)
        if (own_column >= VALUES) & (own_column < VALUES + STATE_DIM):
            store_rows(
                p_keys,
                p_next_keys,
                b_mixed,
                o_row,
                o_next_row,
                o_d,
                is_first,
                is_last,
                STATE_DIM,
            )
        if own_column == 0:
            i_head = i_unit * NUM_HEADS
            o_head = i_head + tl.arange(0, NUM_HEADS)
            b_decay, b_step = _gates(
                p_parts + ALL_VALUES + ALL_CHANNELS + o_token[:, None] * stride_part,
                tl.load(p_rates + o_head),
                tl.load(p_step_biases + o_head),
                o_head,
                is_own,
            )
            p_gate = p_gates + 2 * (o_token[:, None] * (NUM_UNITS * NUM_HEADS) + o_head[None, :])
            tl.store(p_gate, b_decay, mask=is_own[:, None])
            tl.store(p_gate + 1, b_step, mask=is_own[:, None])
            store_rows(
                floats(p_unit + DECAYS_AT) - i_head,
                floats(p_next + DECAYS_AT) - i_head,
                b_decay,
                o_row,
                o_next_row,
                o_head,
                is_first,
                is_last,
                NUM_HEADS,
            )
    if crosses & (span == 0):
        _copy_inputs(
            p_own,
            stride_part,
            p_read,
            p_next_tail,
            o_d,
            oldest,
            start,
            first_read,
            read_before,
            border,
            OF_UNIT,
            BEFORE,
            BEFORE_TILE,
        )
