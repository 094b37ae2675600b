"""Gated outputs of Mamba-2's heads from their states, and the states at the next borders.

A program goes over the blocks of a row one after another, in tiles of fixed sizes whose rows are
tokens of a block. A token's row is the same whatever later rows hold, since they are multiplied by
zeros, so its bits do not depend on how many tokens a pass computes. Source: Dao and Gu,
"Transformers are SSMs", 2024."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
from .mamba_layer import MambaLayer
from .mix_channels import MixedChannels

COLUMNS = PIECE_COLUMNS
"""Columns of values that a program computes."""
LONG_PASS = 1024
"""Tokens from which on a pass of several a row loads a block while it computes the one before."""


def block_states(
    mixed: MixedChannels,
    parts: torch.Tensor,
    layer: MambaLayer,
    memory: StateMemory,
    *,
    are_neighbours: bool = False,
    advances: bool = False,
) -> torch.Tensor:
    """Mixed channels and the projection of T tokens → gated outputs [T, heads · head_dim]; of
    tokens of no row zeros. Reads the states of the rows' first blocks, and writes those of their
    last blocks. `are_neighbours`: as in `mamba`; `advances`: writes states alone, and of rows of
    one token."""
    unit = layer.unit
    is_wide = parts.dtype == torch.float32
    # Padding must stay a number: what is drawn of it is a token of the next step's padding.
    are_written = advances or memory.has_tokens
    made = parts.new_empty if are_written else parts.new_zeros
    out = made(len(parts), layer.values_size)
    is_long = len(parts) >= LONG_PASS and len(memory.starts) < len(parts)
    columns = triton.cdiv(unit.head_dim, COLUMNS)
    _block_states[(len(memory.starts), layer.num_heads * columns)](
        mixed.rows,
        mixed.gates,
        parts,
        layer.skips,
        out,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        mixed.rows.stride(0),
        mixed.gates.stride(0),
        parts.stride(0),
        out.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        *memory.layout.of_pieces,
        DECAYS_AT=unit.decays_at,
        KEYS_AT=unit.keys_at,
        VALUES_AT=unit.values_at,
        NUM_HEADS=unit.num_heads,
        HEAD_DIM=unit.head_dim,
        STATE_DIM=unit.state_dim,
        STATE_TILE=max(unit.state_dim, LEAST_SIZE),
        COLUMNS=COLUMNS,
        PIECE_COLUMNS=unit.columns,
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        ADVANCES=advances,
        CLEARS=memory.has_tokens and not advances,
        PRECISION="ieee" if is_wide else "tf32",
        ROUNDS=not is_wide,
        num_warps=8 if is_long else 4,
        num_stages=2 if is_long else 1,
    )
    return out


@triton.jit
def _tail_of(
    p_rows, p_unit, DECAYS_AT: tl.constexpr, KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr
):
    """Addresses of decays, keys and values in a unit's tail."""
    rows = tl.pointer_type(p_rows.dtype.element_ty)
    p_keys = (p_unit + KEYS_AT).to(rows, bitcast=True)
    return floats(p_unit + DECAYS_AT), p_keys, (p_unit + VALUES_AT).to(rows, bitcast=True)


@triton.jit
def _columns(p, stride, o_token, o_d, mask):
    """Rows [tokens, numbers]; o_token [tokens, 1]."""
    return tl.load(p + o_token * stride + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def _outputs(
    b_query,
    b_key,
    b_value,
    b_state,
    b_sum,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Outputs of a block's tokens [BLOCK, columns] from the state at its border; b_sum: logarithms
    of decays since the border."""
    o_t = tl.arange(0, BLOCK)
    is_seen = o_t[:, None] >= o_t[None, :]
    b_left = tl.exp(tl.where(is_seen, b_sum[:, None] - b_sum[None, :], -float("inf")))
    b_weight = dot(b_query, tl.trans(b_key), PRECISION, ROUNDS) * b_left
    b_out = tl.exp(b_sum)[:, None] * dot(b_query, b_state, PRECISION, ROUNDS)
    return b_out + dot(b_weight, b_value, PRECISION, ROUNDS)


@triton.jit
def _places_of(
    part, o_n, o_v, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PIECE_COLUMNS: tl.constexpr
):
    """Piece of a head's state of each of a program's columns, [1, columns] or the only one, and
    offsets in pieces [state, columns]."""
    if PIECE_COLUMNS < COLUMNS:
        # The last columns of a program may be behind those of its head.
        o_own = tl.minimum(o_v // PIECE_COLUMNS, (HEAD_DIM - 1 - part) // PIECE_COLUMNS)
        o_piece = (part // PIECE_COLUMNS + o_own)[None, :]
        o_column = o_v % PIECE_COLUMNS
    else:
        o_piece = part // PIECE_COLUMNS
        o_column = part % PIECE_COLUMNS + o_v
    return o_piece, o_n[:, None] * PIECE_COLUMNS + o_column[None, :]


@triton.jit
def _store_gated(p_out, b_out, b_gate, is_stored):
    """Stores outputs times the SiLU of their gates."""
    b_out = b_out * (b_gate / (1 + tl.exp(-b_gate)))
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=is_stored)


@triton.jit
def _advanced(
    b_state,
    b_key,
    b_value,
    b_sum,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The state behind a whole block."""
    b_total = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, b_sum, 0.0), axis=0)
    b_late = b_key.to(tl.float32) * tl.exp(b_total - b_sum)[:, None]
    return b_state * tl.exp(b_total) + dot(tl.trans(b_late), b_value, PRECISION, ROUNDS)


@triton.jit
def _block_states(
    p_rows,
    p_gates,
    p_parts,
    p_skips,
    p_out,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    stride_row,
    stride_gate,
    stride_part,
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
    DECAYS_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    STATE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ADVANCES: tl.constexpr,
    CLEARS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    VALUES: tl.constexpr = NUM_HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * STATE_DIM
    PARTS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) // PARTS
    i_unit = i_head // NUM_HEADS
    i_of_unit = i_head % NUM_HEADS
    part = tl.program_id(1) % PARTS * COLUMNS
    # Column of the program's values in its unit, and in outputs and gates of all heads.
    own_column = i_of_unit * HEAD_DIM + part
    column = i_head * HEAD_DIM + part
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    before = start // BLOCK * BLOCK
    last = end // BLOCK * BLOCK
    clear(
        p_out + token.to(tl.int64) * stride_out + column,
        HEAD_DIM - part,
        (end <= start) & CLEARS,
        COLUMNS,
    )
    if (end <= start) | (ADVANCES & ((last == before) | (end > start + 1))):
        return
    read = first_read(p_first, p_starts, p_ends, stride_table, i_row, start, end, BLOCK, NEIGHBOURS)
    read_token = token + read - start
    p_unit = tail_address(
        p_pages,
        p_first,
        stride_table,
        stride_page,
        i_row,
        first_unit + i_unit,
        tails_per_page,
        tail_bytes,
    )
    p_next = tail_address(
        p_pages,
        p_last,
        stride_table,
        stride_page,
        i_row,
        first_unit + i_unit,
        tails_per_page,
        tail_bytes,
    )
    p_decays, p_keys, p_kept = _tail_of(p_rows, p_unit, DECAYS_AT, KEYS_AT, VALUES_AT)
    _, _, p_next_kept = _tail_of(p_rows, p_next, DECAYS_AT, KEYS_AT, VALUES_AT)
    p_value = p_rows + i_unit * CHANNELS + own_column
    p_key = p_rows + i_unit * CHANNELS + VALUES
    skip = tl.load(p_skips + i_head)
    o_t = tl.arange(0, BLOCK)
    o_n = tl.arange(0, STATE_TILE)
    o_v = tl.arange(0, COLUMNS)
    is_column = (o_v < HEAD_DIM - part)[None, :]
    o_piece, o_state = _places_of(part, o_n, o_v, HEAD_DIM, COLUMNS, PIECE_COLUMNS)
    is_inside = (o_n < STATE_DIM)[:, None] & is_column
    p_state, p_next_state = piece_addresses(
        p_pages,
        p_first,
        p_last,
        stride_table,
        stride_page,
        i_row,
        (first_unit * NUM_HEADS + i_head) * (HEAD_DIM // PIECE_COLUMNS) + o_piece,
        num_behind,
        pieces_behind,
        pieces_at,
        num_tail_pages,
        pieces_per_page,
        piece_bytes,
    )
    # The state before a sequence is zeros, and no page holds it.
    b_state = tl.load(p_state + o_state, mask=is_inside & (before > 0), other=0.0)
    for border in range(before, end, BLOCK):
        o_position = border + o_t
        is_own = ((o_position >= start) & (o_position < end))[:, None]
        is_read = ((o_position >= read) & (o_position < end))[:, None]
        o_token = (token + o_position - start).to(tl.int64)[:, None]
        b_sum = load_gate(
            p_gates + 2 * i_head,
            stride_gate,
            p_decays + i_of_unit,
            o_position,
            read,
            end,
            read_token,
            before,
            NUM_HEADS,
        )
        b_sum = tl.cumsum(b_sum, 0)
        b_key = load_rows(
            p_key,
            stride_row,
            p_keys,
            o_position,
            o_n,
            read,
            end,
            read_token,
            before,
            STATE_DIM,
            STATE_DIM,
            STATE_DIM,
        )
        b_x = _columns(p_value, stride_row, o_token, o_v, is_read & is_column).to(tl.float32)
        b_step = tl.load(p_gates + 2 * i_head + 1 + o_token * stride_gate, mask=is_read, other=0.0)
        b_fresh = (b_x * b_step).to(p_rows.dtype.element_ty)
        # Values of tokens before the pass are in the tail of its first block.
        o_kept = o_t[:, None] * VALUES + own_column + o_v[None, :]
        is_early = (o_position < read)[:, None] & is_column
        b_value = tl.where(is_read, b_fresh, tl.load(p_kept + o_kept, mask=is_early, other=0.0))
        is_kept = is_own & is_column
        tl.store(p_kept + o_kept, b_fresh, mask=is_kept & (border == before))
        tl.store(p_next_kept + o_kept, b_fresh, mask=is_kept & (border == last) & (last > before))
        if not ADVANCES:
            is_query = is_own & (o_n < STATE_DIM)[None, :]
            b_query = _columns(p_key + STATE_DIM, stride_row, o_token, o_n, is_query)
            b_out = _outputs(b_query, b_key, b_value, b_state, b_sum, BLOCK, PRECISION, ROUNDS)
            b_gate = _columns(p_parts + column, stride_part, o_token, o_v, is_kept)
            _store_gated(
                p_out + o_token * stride_out + column + o_v[None, :],
                b_out + skip * b_x,
                b_gate.to(tl.float32),
                is_kept,
            )
        if end >= border + BLOCK:
            b_state = _advanced(b_state, b_key, b_value, b_sum, BLOCK, PRECISION, ROUNDS)
    if last > before:
        tl.store(p_next_state + o_state, b_state, mask=is_inside)
