"""Gated delta nets of rows of one token each, in one launch: the bits of `mix_inputs`,
`inverse_rows`, `block_states` and `gated_norm` one after another.

A program computes one value head of a row. What earlier steps wrote, the state and the tail of the
row's block, is read while the projections are still computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    ask_early,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from ..states.block_rows import (
    LEAST_SIZE,
    clear,
    dot,
    piece_addresses,
    tail_address,
)
from ..states.state_memory import StateMemory
from .block_states import COLUMNS, advanced, copy_inputs, tail_of
from .delta_arguments import DeltaLayer
from .delta_unit import DeltaUnit
from .gated_norm import HEADS, gated
from .inverse_rows import as_products
from .mix_inputs import BEFORE, TILE, gates_of, keep_rows, mixed_rows, store_gates

NUM_WARPS = 4
"""As many warps as the other kernels have, so that reductions add in the same order."""
ROWS = 64
"""Rows that the matrix unit multiplies at once."""


def serves(
    wide: torch.Tensor, unit: DeltaUnit, memory: StateMemory, *, are_neighbours: bool
) -> bool:
    """Whether each row of a batch has one token of a sequence of its own, in bfloat16, and value
    heads have two pieces, as all published ones have."""
    are_whole = unit.value_dim == 2 * COLUMNS and unit.key_dim >= LEAST_SIZE
    is_served = memory.has_tokens and not are_neighbours
    return is_served and are_whole and wide.dtype == torch.bfloat16


def delta_tokens(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    layer: DeltaLayer,
    memory: StateMemory,
    *,
    dependent: bool = False,
) -> torch.Tensor:
    """As `delta_net`, for a batch that `serves`. With `dependent`, the previous kernels may still
    be writing the projections."""
    unit = layer.unit
    out = wide.new_empty(len(wide), layer.values_size)
    _delta_tokens[(len(memory.starts), layer.num_heads * unit.num_values)](
        wide,
        narrow,
        layer.conv,
        layer.rates,
        layer.biases,
        layer.norm,
        out,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        unit.key_dim**-0.5,
        layer.eps,
        wide.stride(0),
        narrow.stride(0),
        out.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        *memory.layout.of_pieces,
        *(layer.places.query + layer.places.key + layer.places.value + layer.places.z),
        *(layer.places.decay + layer.places.share),
        GATES_AT=unit.gates_at,
        KEYS_AT=unit.keys_at,
        VALUES_AT=unit.values_at,
        ROWS_AT=unit.rows_at,
        NUM_VALUES=unit.num_values,
        KEY_DIM=unit.key_dim,
        VALUE_DIM=unit.value_dim,
        COLUMNS=COLUMNS,
        BLOCK=unit.block_size,
        TILE=TILE,
        ROWS=ROWS,
        HEADS=HEADS * NUM_WARPS,
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        num_stages=1,
        **launch_options(dependent),
    )
    return out


@triton.jit
def _row_of(b_x, i):
    """Row i [numbers] of a tile."""
    o_row = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where((o_row == i)[:, None], b_x, 0.0), axis=0)


@triton.jit
def _ask_for_inputs(
    p_tail,
    p_taps,
    p_rate,
    p_bias,
    p_norm,
    i,
    i_of_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Prefetches the inputs of the three tokens before, and the layer's weights."""
    FLOATS: tl.constexpr = 32
    o_row = tl.arange(0, BEFORE + 1)[:, None] * CHANNELS
    o_key = tl.arange(0, 2 * KEY_DIM // FLOATS)[None, :] * FLOATS
    o_value = tl.arange(0, VALUE_DIM // FLOATS)[None, :] * FLOATS
    p_tail += i * CHANNELS
    column = 2 * KEY_DIM + i_of_head * VALUE_DIM
    ask_early(p_tail + o_row + o_key, DEPENDENT)
    ask_early(p_tail + column + o_row + o_value, DEPENDENT)
    ask_early(p_taps + o_row + o_key, DEPENDENT)
    ask_early(p_taps + column + o_row + o_value, DEPENDENT)
    ask_early(p_norm + o_value, DEPENDENT)
    ask_early(p_rate + tl.arange(0, 1), DEPENDENT)
    ask_early(p_bias + tl.arange(0, 1), DEPENDENT)


@triton.jit
def _kept_inverse(p_kept_rows, count, BLOCK: tl.constexpr):
    """So many rows of the inverse from the tail, and those of the identity behind them."""
    o_t = tl.arange(0, BLOCK)
    is_kept = (o_t < count)[:, None]
    o_cell = o_t[:, None] * BLOCK + o_t[None, :]
    b_one = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
    return tl.where(is_kept, tl.load(p_kept_rows + o_cell, mask=is_kept, other=0.0), b_one)


@triton.jit
def _mixed_row(
    p_own,
    p_taps,
    p_tail,
    p_next_tail,
    p_keys,
    o_d,
    start,
    kept_end,
    before,
    scale,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_KEY: tl.constexpr,
):
    """The token's mixed query, key or values [numbers], in a tile of `mix_inputs` whose first row
    is the token's. Keeps inputs, and keys, of positions before `kept_end`."""
    o_position = start + tl.arange(0, TILE)
    b_x, b_mixed = mixed_rows(
        p_own,
        0,
        p_taps,
        p_tail,
        o_position,
        o_d,
        start,
        start + 1,
        0,
        before,
        scale,
        CHANNELS,
        IS_SCALED,
    )
    keep_rows(
        p_tail,
        p_next_tail,
        p_keys,
        p_keys,
        b_x,
        b_mixed,
        o_position,
        o_d,
        start,
        kept_end,
        BLOCK,
        CHANNELS,
        IS_KEY,
    )
    return _row_of(b_mixed.to(tl.float32), 0)


@triton.jit
def _read_half(
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
    p_kept,
    i,
    has_state,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Addresses of a half of the state in the first and the next set, the half as products round
    it, and corrected values of the block's earlier tokens."""
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
    o_t = tl.arange(0, BLOCK)[:, None]
    b_state = _load_state(p_state, has_state, KEY_DIM, COLUMNS)
    p_value = p_kept + o_t * VALUE_DIM + tl.arange(0, COLUMNS)[None, :]
    b_early = tl.load(p_value, mask=o_t < i, other=0.0)
    return p_state, p_next_state, b_state.to(tl.bfloat16), b_early


@triton.jit
def _load_state(p_state, has_state, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """A half of the state [keys, columns], zeros before the sequence."""
    o_state = tl.arange(0, KEY_DIM)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(p_state + o_state, mask=has_state & (o_state >= 0), other=0.0)


@triton.jit
def _pair(b_query, b_key, ROWS: tl.constexpr):
    """A tile whose rows are the query, the key and zeros: a row of a product depends on no
    other."""
    o_row = tl.arange(0, ROWS)[:, None]
    b_pair = tl.where(o_row == 0, b_query[None, :], 0.0)
    return tl.where(o_row == 1, b_key[None, :], b_pair)


@triton.jit
def _new_row(b_pair, b_key, b_inverse, b_sum, share, i, p_kept_rows):
    """The weights of corrected values in the token's output, in a tile whose other rows are zeros,
    and the decay since the border. Stores the token's row of the inverse."""
    o_t = tl.arange(0, b_sum.shape[0])
    since_sum = tl.sum(tl.where(o_t == i, b_sum, 0.0), axis=0)
    b_left = tl.exp(tl.where(o_t <= i, since_sum - b_sum, -float("inf")))
    b_gap = tl.exp(tl.where(o_t < i, since_sum - b_sum, -float("inf")))
    b_scores = dot(b_pair, tl.trans(b_key), "tf32", True)
    b_lower = _row_of(b_scores, 1) * b_gap * share
    b_change = tl.sum(b_lower[None, :] * as_products(tl.trans(b_inverse)), axis=1)
    b_row = tl.where(o_t == i, 1.0, 0.0) - b_change
    tl.store(p_kept_rows + i * b_sum.shape[0] + o_t, b_row)
    b_inverse = tl.where((o_t == i)[:, None], b_row[None, :], b_inverse)
    o_row = tl.arange(0, b_pair.shape[0])[:, None]
    b_weight = tl.where(o_row == 0, (_row_of(b_scores, 0) * b_left)[None, :], 0.0)
    return dot(b_weight, b_inverse, "tf32", True), tl.exp(since_sum)


@triton.jit
def _store_half(
    b_pair, b_state, b_early, b_value, b_weight, since, share, i, p_kept, p_out, VALUE_DIM
):
    """Stores the token's corrected values, and its outputs before their norm."""
    o_t = tl.arange(0, b_early.shape[0])
    o_v = tl.arange(0, b_early.shape[1])
    b_both = dot(b_pair, b_state, "tf32", True)
    b_fresh = b_value - since * _row_of(b_both, 1)
    b_fresh = (share * b_fresh).to(b_early.dtype)
    tl.store(p_kept + i * VALUE_DIM + o_v, b_fresh)
    b_corrected = tl.where((o_t == i)[:, None], b_fresh[None, :], b_early)
    b_out = since * b_both
    b_out += dot(b_weight, b_corrected, "tf32", True)
    tl.store(p_out + o_v, _row_of(b_out, 0).to(p_out.dtype.element_ty))


@triton.jit
def _store_next_half(
    p_state,
    p_next_state,
    has_state,
    b_key,
    b_inverse,
    b_sum,
    p_kept,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores a half of the state at the border behind the token."""
    o_t = tl.arange(0, b_key.shape[0])[:, None]
    o_v = tl.arange(0, COLUMNS)[None, :]
    KEY_DIM: tl.constexpr = b_key.shape[1]
    b_corrected = tl.load(p_kept + o_t * VALUE_DIM + o_v)
    b_state = _load_state(p_state, has_state, KEY_DIM, COLUMNS)
    b_state = advanced(b_state, b_key, b_inverse, b_corrected, b_sum, "tf32", True)
    tl.store(p_next_state + tl.arange(0, KEY_DIM)[:, None] * COLUMNS + o_v, b_state)


@triton.jit
def _load_head(p_head, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """A head as the first one of a tile of `gated_norm`."""
    o_head = tl.arange(0, HEADS)[:, None]
    o_d = tl.arange(0, VALUE_DIM)[None, :]
    return tl.load(p_head + o_head * VALUE_DIM + o_d, mask=(o_head == 0) & (o_d >= 0), other=0.0)


@triton.jit
def _store_normed(p_head, b_z, p_norm, eps):
    """Replaces the head in memory, which is whole, by what `gated_norm` makes of it."""
    tl.debug_barrier()
    HEADS: tl.constexpr = b_z.shape[0]
    VALUE_DIM: tl.constexpr = b_z.shape[1]
    o_head = tl.arange(0, HEADS)[:, None]
    o_d = tl.arange(0, VALUE_DIM)
    b_x = _load_head(p_head, HEADS, VALUE_DIM).to(tl.float32)
    b_x = gated(b_x, b_z.to(tl.float32), tl.load(p_norm + o_d), eps)
    tl.store(p_head + o_head * VALUE_DIM + o_d[None, :], b_x.to(b_z.dtype), mask=o_head == 0)


@triton.jit
def _delta_tokens(
    p_wide,
    p_narrow,
    p_conv,
    p_rates,
    p_biases,
    p_norm,
    p_out,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    scale,
    eps,
    stride_wide,
    stride_narrow,
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
    query_first,
    query_stride,
    key_first,
    key_stride,
    value_first,
    value_stride,
    z_first,
    z_stride,
    decay_first,
    decay_stride,
    share_first,
    share_stride,
    GATES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    release_dependents(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    i_value = tl.program_id(1)
    i_head = i_value // NUM_VALUES
    i_of_head = i_value % NUM_VALUES
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row).to(tl.int64)
    p_heads = p_out + token * stride_out + i_value * VALUE_DIM
    if end <= start:
        wait_for_inputs(DEPENDENT)
        clear(p_heads, VALUE_DIM, True, VALUE_DIM)
        return
    before = start // BLOCK * BLOCK
    i = start - before
    p_unit = tail_address(
        p_pages,
        p_first,
        stride_table,
        stride_page,
        i_row,
        first_unit + i_head,
        tails_per_page,
        tail_bytes,
    )
    p_next = tail_address(
        p_pages,
        p_last,
        stride_table,
        stride_page,
        i_row,
        first_unit + i_head,
        tails_per_page,
        tail_bytes,
    )
    p_tail, p_keys, p_kept, p_kept_rows, p_kept_gates = tail_of(
        p_wide, p_unit, i_of_head, 0, GATES_AT, KEYS_AT, VALUES_AT, ROWS_AT, VALUE_DIM, BLOCK
    )
    p_next_tail, _, _, _, _ = tail_of(
        p_wide, p_next, i_of_head, 0, GATES_AT, KEYS_AT, VALUES_AT, ROWS_AT, VALUE_DIM, BLOCK
    )
    o_t = tl.arange(0, BLOCK)
    o_k = tl.arange(0, KEY_DIM)
    o_d = tl.arange(0, VALUE_DIM)
    is_early = (o_t < i)[:, None]
    b_decay = tl.load(p_kept_gates + o_t * 2 * NUM_VALUES, mask=o_t < i, other=0.0)
    o_key = o_t[:, None] * KEY_DIM + o_k[None, :]
    b_key = tl.load(p_keys + o_key, mask=is_early, other=0.0)
    b_inverse = _kept_inverse(p_kept_rows, i, BLOCK)
    piece = 2 * (first_unit * NUM_VALUES + i_value)
    p_low, p_next_low, b_low, b_early_low = _read_half(
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
        p_kept,
        i,
        before > 0,
        KEY_DIM,
        VALUE_DIM,
        COLUMNS,
        BLOCK,
    )
    p_high, p_next_high, b_high, b_early_high = _read_half(
        p_pages,
        p_first,
        p_last,
        stride_table,
        stride_page,
        i_row,
        piece + 1,
        num_behind,
        pieces_behind,
        pieces_at,
        num_tail_pages,
        pieces_per_page,
        piece_bytes,
        p_kept + COLUMNS,
        i,
        before > 0,
        KEY_DIM,
        VALUE_DIM,
        COLUMNS,
        BLOCK,
    )
    _ask_for_inputs(
        p_tail,
        p_conv + i_head * (BEFORE + 1) * CHANNELS,
        p_rates + i_value,
        p_biases + i_value,
        p_norm,
        i,
        i_of_head,
        KEY_DIM,
        VALUE_DIM,
        CHANNELS,
        DEPENDENT,
    )
    wait_for_inputs(DEPENDENT)
    p_row = p_wide + token * stride_wide
    p_z = p_row + z_first + i_head * z_stride + i_of_head * VALUE_DIM
    b_z = _load_head(p_z, HEADS, VALUE_DIM)
    decay, share = gates_of(
        p_narrow + token * stride_narrow,
        decay_first + i_head * decay_stride + i_of_head,
        share_first + i_head * share_stride + i_of_head,
        tl.load(p_rates + i_value),
        tl.load(p_biases + i_value),
        True,
    )
    store_gates(p_kept_gates + 2 * i * NUM_VALUES, decay, share, True)
    p_taps = p_conv + i_head * (BEFORE + 1) * CHANNELS
    # One program of a key head keeps what its value heads share.
    shared_end = tl.where(i_of_head == 0, end, start)
    b_query = _mixed_row(
        p_row + query_first + i_head * query_stride,
        p_taps,
        p_tail,
        p_next_tail,
        p_keys,
        o_k,
        start,
        shared_end,
        before,
        scale,
        BLOCK,
        CHANNELS,
        TILE,
        True,
        False,
    )
    b_own_key = _mixed_row(
        p_row + key_first + i_head * key_stride,
        p_taps + KEY_DIM,
        p_tail + KEY_DIM,
        p_next_tail + KEY_DIM,
        p_keys,
        o_k,
        start,
        shared_end,
        before,
        1.0,
        BLOCK,
        CHANNELS,
        TILE,
        True,
        True,
    )
    column = 2 * KEY_DIM + i_of_head * VALUE_DIM
    b_values = _mixed_row(
        p_row + value_first + i_head * value_stride + i_of_head * VALUE_DIM,
        p_taps + column,
        p_tail + column,
        p_next_tail + column,
        p_keys,
        o_d,
        start,
        end,
        before,
        1.0,
        BLOCK,
        CHANNELS,
        TILE,
        False,
        False,
    )
    b_pair = _pair(b_query, b_own_key, ROWS)
    b_key = tl.where((o_t == i)[:, None], b_own_key.to(b_key.dtype)[None, :], b_key)
    b_sum = tl.cumsum(tl.where(o_t == i, decay, b_decay), 0)
    b_weight, since = _new_row(b_pair, b_key, b_inverse, b_sum, share, i, p_kept_rows)
    b_values = tl.reshape(b_values, [2, COLUMNS])
    _store_half(
        b_pair,
        b_low,
        b_early_low,
        _row_of(b_values, 0),
        b_weight,
        since,
        share,
        i,
        p_kept,
        p_heads,
        VALUE_DIM,
    )
    _store_half(
        b_pair,
        b_high,
        b_early_high,
        _row_of(b_values, 1),
        b_weight,
        since,
        share,
        i,
        p_kept + COLUMNS,
        p_heads + COLUMNS,
        VALUE_DIM,
    )
    _store_normed(p_heads, b_z, p_norm, eps)
    if end == before + BLOCK:
        # Tiles are read again, in place of holding them until here.
        b_key = tl.load(p_keys + o_key, mask=is_early, other=0.0)
        b_key = tl.where((o_t == i)[:, None], b_own_key.to(b_key.dtype)[None, :], b_key)
        b_inverse = _kept_inverse(p_kept_rows, BLOCK, BLOCK)
        _store_next_half(
            p_low, p_next_low, before > 0, b_key, b_inverse, b_sum, p_kept, VALUE_DIM, COLUMNS
        )
        _store_next_half(
            p_high,
            p_next_high,
            before > 0,
            b_key,
            b_inverse,
            b_sum,
            p_kept + COLUMNS,
            VALUE_DIM,
            COLUMNS,
        )
        copy_inputs(
            p_tail, p_next_tail, i_of_head, 0, o_d, start, before, end, KEY_DIM, VALUE_DIM, CHANNELS
        )
