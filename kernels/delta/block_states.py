"""Outputs of gated delta nets from their states, and the states at the next borders.

A program goes over the blocks of a row one after another, in tiles of fixed sizes whose rows are
tokens of a block. A token's row is the same whatever later rows hold, since they are multiplied by
zeros, so its bits do not depend on how many tokens a pass computes. Source: as of `inverse_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..states.block_rows import (
    LEAST_SIZE,
    clear,
    dot,
    first_read,
    floats,
    load_gate,
    load_rows,
    piece_addresses,
    tail_address,
)
from ..states.set_layout import PIECE_COLUMNS
from ..states.state_memory import StateMemory
from .delta_arguments import DeltaLayer
from .inverse_rows import BlockRows
from .mix_inputs import BEFORE, MixedInputs

COLUMNS = PIECE_COLUMNS
"""Columns of values that a program computes."""
LONG_PASS = 1024
"""Tokens from which on a pass of several a row loads a block while it computes the one before. With
the same bits, 8,192 tokens of one row take 0.45 ms in place of 0.78, and 64 rows of one token 190
us in place of 122 (one H200, heads of 128, 2026-11-29)."""


def block_states(
    mixed: MixedInputs,
    rows: BlockRows,
    layer: DeltaLayer,
    memory: StateMemory,
    *,
    are_neighbours: bool = False,
    advances: bool = False,
    dependent: bool = False,
    columns: int = COLUMNS,
) -> torch.Tensor:
    """Mixed inputs and rows of T tokens → outputs of the value heads [T, value heads · value_dim];
    of tokens of no row zeros. Reads the states of the rows' first blocks, and writes those of their
    last blocks. `are_neighbours` and `dependent`: as in `delta_net`; `advances`: writes states
    alone, and of rows of one token. `columns` of values for a program, within a piece of the
    state."""
    unit = layer.unit
    assert unit.columns % min(columns, unit.columns) == 0
    is_wide = mixed.rows.dtype == torch.float32
    # Padding must stay a number: what is drawn of it is a token of the next step's padding.
    are_written = advances or memory.has_tokens
    made = mixed.rows.new_empty if are_written else mixed.rows.new_zeros
    out = made(len(mixed.rows), layer.values_size)
    parts = triton.cdiv(unit.value_dim, columns)
    is_long = len(mixed.rows) >= LONG_PASS and len(memory.starts) < len(mixed.rows)
    _block_states[(len(memory.starts), layer.num_heads * unit.num_values * parts)](
        mixed.rows,
        mixed.gates,
        rows.inverse,
        rows.weights,
        out,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        mixed.rows.stride(0),
        mixed.gates.stride(0),
        rows.inverse.stride(0),
        rows.inverse.stride(1),
        out.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        *memory.layout.of_pieces,
        GATES_AT=unit.gates_at,
        KEYS_AT=unit.keys_at,
        VALUES_AT=unit.values_at,
        ROWS_AT=unit.rows_at,
        PIECE_COLUMNS=unit.columns,
        NUM_VALUES=unit.num_values,
        KEY_DIM=unit.key_dim,
        KEY_TILE=max(unit.key_dim, LEAST_SIZE),
        VALUE_DIM=unit.value_dim,
        COLUMNS=columns,
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        ADVANCES=advances,
        CLEARS=memory.has_tokens and not advances,
        PRECISION="ieee" if is_wide else "tf32",
        ROUNDS=not is_wide,
        DEPENDENT=dependent,
        num_warps=4,
        num_stages=2 if is_long else 1,
        **launch_options(dependent),
    )
    return out


@triton.jit
def tail_of(
    p_rows,
    p_unit,
    i_of_head,
    column,
    GATES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Addresses in a unit's tail: inputs, keys, and of a value head its values from a column on,
    rows of its inverse, and gates."""
    elements = tl.pointer_type(p_rows.dtype.element_ty)
    p_tail = p_unit.to(elements, bitcast=True)
    p_keys = (p_unit + KEYS_AT).to(elements, bitcast=True)
    p_values = (p_unit + VALUES_AT).to(elements, bitcast=True)
    p_values += i_of_head * BLOCK * VALUE_DIM + column
    p_inverse = floats(p_unit + ROWS_AT) + i_of_head * BLOCK * BLOCK
    return p_tail, p_keys, p_values, p_inverse, floats(p_unit + GATES_AT) + 2 * i_of_head


@triton.jit
def _load(p, stride, o_token, o_d, mask):
    """Rows [tokens, numbers]; o_token [tokens, 1]."""
    return tl.load(p + o_token * stride + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_whole(p, stride, o_token, o_d, SIZE: tl.constexpr):
    """As `_load`, without a mask where none is needed: SIZE numbers of each row."""
    if o_d.shape[0] == SIZE:
        return tl.load(p + o_token * stride + o_d[None, :])
    inside = (o_d < SIZE)[None, :] & (o_token >= 0)
    return tl.load(p + o_token * stride + o_d[None, :], mask=inside, other=0.0)


@triton.jit
def advanced(
    b_state, b_key, b_inverse, b_corrected, b_sum, PRECISION: tl.constexpr, ROUNDS: tl.constexpr
):
    """The state behind a whole block; b_sum: logarithms of decays since the border."""
    b_solved = dot(b_inverse, b_corrected, PRECISION, ROUNDS)
    BLOCK: tl.constexpr = b_sum.shape[0]
    b_total = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, b_sum, 0.0), axis=0)
    b_late = b_key.to(tl.float32) * tl.exp(b_total - b_sum)[:, None]
    b_change = dot(tl.trans(b_late), b_solved, PRECISION, ROUNDS)
    return b_state * tl.exp(b_total) + b_change


@triton.jit
def _copy_part(p_tail, p_next_tail, first, o_d, size, start, before, border, CHANNELS):
    """Copies so many inputs from the first on, of tokens before the border and before the pass, to
    the tail behind it."""
    o_row = tl.arange(0, 4)
    o_position = border - BEFORE + o_row
    is_kept = ((o_row < BEFORE) & (o_position < start))[:, None] & (o_d < size)[None, :]
    o_from = (o_position - before + BEFORE)[:, None] * CHANNELS + first + o_d[None, :]
    b_x = tl.load(p_tail + o_from, mask=is_kept, other=0.0)
    tl.store(p_next_tail + o_row[:, None] * CHANNELS + first + o_d[None, :], b_x, mask=is_kept)


@triton.jit
def copy_inputs(
    p_tail,
    p_next_tail,
    i_of_head,
    column,
    o_v,
    start,
    before,
    border,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copies inputs of the program's values; one program copies those of queries and keys."""
    at = 2 * KEY_DIM + i_of_head * VALUE_DIM + column
    num_columns = VALUE_DIM - column
    _copy_part(p_tail, p_next_tail, at, o_v, num_columns, start, before, border, CHANNELS)
    if (i_of_head == 0) & (column == 0):
        o_both = tl.arange(0, 2 * KEY_DIM)
        _copy_part(p_tail, p_next_tail, 0, o_both, 2 * KEY_DIM, start, before, border, CHANNELS)


@triton.jit
def _edge_block(
    b_state,
    border,
    p_rows,
    p_gates,
    p_inverse,
    p_weights,
    p_out,
    p_keys,
    p_kept,
    p_kept_rows,
    p_kept_gates,
    p_next_kept,
    stride_row,
    stride_gate,
    stride_inverse,
    stride_head,
    stride_out,
    start,
    end,
    token,
    read,
    before,
    last,
    i_value,
    column,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADVANCES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The state behind a row's first or last block. Stores outputs, and what the tail keeps."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    i_of_head = i_value % NUM_VALUES
    p_query = p_rows + i_value // NUM_VALUES * CHANNELS
    p_value = p_query + 2 * KEY_DIM + i_of_head * VALUE_DIM + column
    o_t = tl.arange(0, BLOCK)
    o_k = tl.arange(0, KEY_TILE)
    o_v = tl.arange(0, COLUMNS)
    is_column = (o_v < VALUE_DIM - column)[None, :]
    o_position = border + o_t
    is_own = ((o_position >= start) & (o_position < end))[:, None]
    is_read = ((o_position >= read) & (o_position < end))[:, None]
    o_token = (token + o_position - start).to(tl.int64)[:, None]
    b_sum = load_gate(
        p_gates + 2 * i_value,
        stride_gate,
        p_kept_gates,
        o_position,
        read,
        end,
        token + read - start,
        before,
        2 * NUM_VALUES,
    )
    b_sum = tl.cumsum(b_sum, 0)
    b_since = tl.exp(b_sum)[:, None]
    is_whole = end >= border + BLOCK
    # Keys of tokens before the pass are of use for the next state alone.
    b_key = load_rows(
        p_query + KEY_DIM,
        stride_row,
        p_keys,
        o_position,
        o_k,
        read,
        end,
        token + read - start,
        before,
        KEY_DIM,
        tl.where(is_whole, KEY_DIM, 0),
        KEY_DIM,
    )
    b_share = tl.load(p_gates + 2 * i_value + 1 + o_token * stride_gate, mask=is_read, other=0.0)
    b_value = _load(p_value, stride_row, o_token, o_v, is_read & is_column).to(tl.float32)
    b_fresh = b_value - b_since * dot(b_key, b_state, PRECISION, ROUNDS)
    b_fresh = (b_share * b_fresh).to(p_rows.dtype.element_ty)
    # Corrected values of tokens before the pass are in the tail of its first block.
    o_kept = o_t[:, None] * VALUE_DIM + o_v[None, :]
    is_early = (o_position < read)[:, None] & is_column
    b_corrected = tl.where(is_read, b_fresh, tl.load(p_kept + o_kept, mask=is_early, other=0.0))
    is_kept = is_own & is_column
    tl.store(p_kept + o_kept, b_fresh, mask=is_kept & (border == before))
    tl.store(p_next_kept + o_kept, b_fresh, mask=is_kept & (border == last) & (last > before))
    if not ADVANCES:
        b_query = _load(p_query, stride_row, o_token, o_k, is_own & (o_k < KEY_DIM)[None, :])
        b_weight = _load(p_weights + i_value * stride_head, stride_inverse, o_token, o_t, is_own)
        b_out = b_since * dot(b_query, b_state, PRECISION, ROUNDS)
        b_out += dot(b_weight, b_corrected, PRECISION, ROUNDS)
        o_out = o_token * stride_out + i_value * VALUE_DIM + column + o_v[None, :]
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=is_own & is_column)
    if is_whole:
        b_inverse = load_rows(
            p_inverse + i_value * stride_head,
            stride_inverse,
            p_kept_rows,
            o_position,
            o_t,
            read,
            end,
            token + read - start,
            before,
            BLOCK,
            BLOCK,
            BLOCK,
        )
        b_state = advanced(b_state, b_key, b_inverse, b_corrected, b_sum, PRECISION, ROUNDS)
    return b_state


@triton.jit
def _inner_block(
    b_state,
    border,
    p_rows,
    p_gates,
    p_inverse,
    p_weights,
    p_out,
    stride_row,
    stride_gate,
    stride_inverse,
    stride_head,
    stride_out,
    start,
    token,
    i_value,
    column,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """As `_edge_block`, of a whole block of the batch's tokens behind the first one: there is no
    tail to read or to write."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    p_query = p_rows + i_value // NUM_VALUES * CHANNELS
    p_value = p_query + 2 * KEY_DIM + (i_value % NUM_VALUES) * VALUE_DIM + column
    o_t = tl.arange(0, BLOCK)
    o_k = tl.arange(0, KEY_TILE)
    o_v = tl.arange(0, COLUMNS)
    is_column = (o_v < VALUE_DIM - column)[None, :]
    o_token = (token + border - start + o_t).to(tl.int64)[:, None]
    p_gate = p_gates + 2 * i_value + (token + border - start + o_t).to(tl.int64) * stride_gate
    b_sum = tl.cumsum(tl.load(p_gate), 0)
    b_since = tl.exp(b_sum)[:, None]
    b_key = _load_whole(p_query + KEY_DIM, stride_row, o_token, o_k, KEY_DIM)
    b_share = tl.load(p_gates + 2 * i_value + 1 + o_token * stride_gate)
    b_value = _load(p_value, stride_row, o_token, o_v, is_column).to(tl.float32)
    b_fresh = b_value - b_since * dot(b_key, b_state, PRECISION, ROUNDS)
    b_corrected = (b_share * b_fresh).to(p_rows.dtype.element_ty)
    b_query = _load_whole(p_query, stride_row, o_token, o_k, KEY_DIM)
    b_weight = _load_whole(p_weights + i_value * stride_head, stride_inverse, o_token, o_t, BLOCK)
    b_out = b_since * dot(b_query, b_state, PRECISION, ROUNDS)
    b_out += dot(b_weight, b_corrected, PRECISION, ROUNDS)
    o_out = o_token * stride_out + i_value * VALUE_DIM + column + o_v[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=is_column)
    b_inverse = _load_whole(p_inverse + i_value * stride_head, stride_inverse, o_token, o_t, BLOCK)
    return advanced(b_state, b_key, b_inverse, b_corrected, b_sum, PRECISION, ROUNDS)


@triton.jit
def _block_states(
    p_rows,
    p_gates,
    p_inverse,
    p_weights,
    p_out,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    stride_row,
    stride_gate,
    stride_inverse,
    stride_head,
    stride_out,
    stride_page,
    stride_table,
    first_unit,
    tails_per_page,
    tail_bytes,
    num_behind,
    pieces_behind,
    pieces_at,
    num_tail_pages,
    pieces_per_page,
    piece_bytes,
    GATES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    PIECE_COLUMNS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ADVANCES: tl.constexpr,
    CLEARS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    PARTS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    i_row = tl.program_id(0).to(tl.int64)
    i_value = tl.program_id(1) // PARTS
    column = tl.program_id(1) % PARTS * COLUMNS
    i_of_head = i_value % NUM_VALUES
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    before = start // BLOCK * BLOCK
    last = end // BLOCK * BLOCK
    clear(
        p_out + token.to(tl.int64) * stride_out + i_value * VALUE_DIM + column,
        VALUE_DIM - column,
        (end <= start) & CLEARS,
        COLUMNS,
    )
    if (end <= start) | (ADVANCES & ((last == before) | (end > start + 1))):
        return
    read = first_read(p_first, p_starts, p_ends, stride_table, i_row, start, end, BLOCK, NEIGHBOURS)
    unit = first_unit + i_value // NUM_VALUES
    p_unit = tail_address(
        p_pages, p_first, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    p_next = tail_address(
        p_pages, p_last, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    p_tail, p_keys, p_kept, p_kept_rows, p_kept_gates = tail_of(
        p_rows,
        p_unit,
        i_of_head,
        column,
        GATES_AT,
        KEYS_AT,
        VALUES_AT,
        ROWS_AT,
        VALUE_DIM,
        BLOCK,
    )
    p_next_tail, _, p_next_kept, _, _ = tail_of(
        p_rows,
        p_next,
        i_of_head,
        column,
        GATES_AT,
        KEYS_AT,
        VALUES_AT,
        ROWS_AT,
        VALUE_DIM,
        BLOCK,
    )
    o_k = tl.arange(0, KEY_TILE)
    o_v = tl.arange(0, COLUMNS)
    is_column = (o_v < VALUE_DIM - column)[None, :]
    PIECES: tl.constexpr = VALUE_DIM // PIECE_COLUMNS
    piece = (first_unit * NUM_VALUES + i_value) * PIECES + column // PIECE_COLUMNS
    o_state = o_k[:, None] * PIECE_COLUMNS + column % PIECE_COLUMNS + o_v[None, :]
    is_inside = (o_k < KEY_DIM)[:, None] & is_column
    p_state, p_next_state = piece_addresses(
        p_pages,
        p_first,
        p_last,
        stride_table,
        stride_page,
        i_row,
        piece,
        num_behind,
        pieces_behind,
        pieces_at,
        num_tail_pages,
        pieces_per_page,
        piece_bytes,
    )
    # The state before a sequence is zeros, and no page holds it.
    b_state = tl.load(p_state + o_state, mask=is_inside & (before > 0), other=0.0)
    # Computes the first block and the last one; after the first those between them.
    for border in range(before, end, tl.maximum(last - before, BLOCK)):
        b_state = _edge_block(
            b_state,
            border,
            p_rows,
            p_gates,
            p_inverse,
            p_weights,
            p_out,
            p_keys,
            p_kept,
            p_kept_rows,
            p_kept_gates,
            p_next_kept,
            stride_row,
            stride_gate,
            stride_inverse,
            stride_head,
            stride_out,
            start,
            end,
            token,
            read,
            before,
            last,
            i_value,
            column,
            NUM_VALUES,
            KEY_DIM,
            KEY_TILE,
            VALUE_DIM,
            COLUMNS,
            BLOCK,
            ADVANCES,
            PRECISION,
            ROUNDS,
        )
        for inner in range(border + BLOCK, end // BLOCK * BLOCK, BLOCK):
            b_state = _inner_block(
                b_state,
                inner,
                p_rows,
                p_gates,
                p_inverse,
                p_weights,
                p_out,
                stride_row,
                stride_gate,
                stride_inverse,
                stride_head,
                stride_out,
                start,
                token,
                i_value,
                column,
                NUM_VALUES,
                KEY_DIM,
                KEY_TILE,
                VALUE_DIM,
                COLUMNS,
                BLOCK,
                PRECISION,
                ROUNDS,
            )
    if last > before:
        tl.store(p_next_state + o_state, b_state, mask=is_inside)
        copy_inputs(
            p_tail,
            p_next_tail,
            i_of_head,
            column,
            o_v,
            start,
            before,
            last,
            KEY_DIM,
            VALUE_DIM,
            CHANNELS,
        )
