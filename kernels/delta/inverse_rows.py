"""Rows of gated delta nets that depend on a block's keys, queries and gates, and on no state: those
of the inverse that solves the delta rule, and those by which outputs are made of corrected values.

Within a block, u = T r: solved values u of corrected ones r, with T = 1 / (1 + L), where L[t, j] is
the share of token t times the decay since token j times the product of their keys, for j < t. A row
of T is made of those before it, in an order that does not depend on how many tokens a pass
computes. Outputs are W T r beside what the state gives, with W[t, j] the decay times the product of
the query of t and the key of j. Source: Yang et al., "Parallelizing linear transformers with the
delta rule over sequence length", 2024."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from ..states.block_rows import (
    LEAST_SIZE,
    dot,
    first_read,
    load_gate,
    load_rows,
    span_of,
    tail_address,
)
from ..states.state_memory import StateMemory
from .delta_arguments import DeltaLayer
from .mix_inputs import MixedInputs

MOST_AT_ONCE = tl.constexpr(8)
"""Rows of the inverse that a turn of a loop makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of T tokens over the tokens of their blocks, [T, value heads, block_size], with equal
    strides, of the model's dtype: products round them to it."""

    inverse: torch.Tensor
    """Rows of the inverse T."""
    weights: torch.Tensor
    """Rows of W T."""
    lower: torch.Tensor
    """Rows of L, float32, in the memory of the other two, which replace them."""

    @classmethod
    def empty(cls, mixed: MixedInputs, num_values: int, block_size: int) -> BlockRows:
        shape = len(mixed.rows), num_values, block_size
        dtype = mixed.rows.dtype
        lower = mixed.gates.new_empty(shape)
        if dtype == lower.dtype:
            return cls(inverse=torch.empty_like(lower), weights=lower, lower=lower)
        inverse, weights = lower.view(dtype).chunk(2, dim=2)
        return cls(inverse=inverse, weights=weights, lower=lower)


def inverse_rows(
    mixed: MixedInputs,
    layer: DeltaLayer,
    memory: StateMemory,
    *,
    are_neighbours: bool = False,
    dependent: bool = False,
) -> BlockRows:
    """Mixed inputs of T tokens → rows of these tokens; those of the first and last blocks are kept
    in their tails. `are_neighbours` and `dependent`: as in `delta_net`."""
    unit = layer.unit
    num_tokens = len(mixed.rows)
    num_values = layer.num_heads * unit.num_values
    rows = BlockRows.empty(mixed, num_values, unit.block_size)
    num_rows = len(memory.starts)
    is_wide = mixed.rows.dtype == torch.float32
    # Where there are as many rows as tokens, each has one.
    searches = num_rows != num_tokens
    # One program more for the block within which a row begins.
    programs = 2 * num_rows + num_tokens // unit.block_size if searches else num_rows
    _inverse_rows[(programs, num_values)](
        mixed.rows,
        mixed.gates,
        rows.lower,
        rows.inverse,
        rows.weights,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        num_rows,
        mixed.rows.stride(0),
        mixed.gates.stride(0),
        rows.lower.stride(0),
        rows.inverse.stride(0),
        rows.inverse.stride(1),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        GATES_AT=unit.gates_at,
        KEYS_AT=unit.keys_at,
        ROWS_AT=unit.rows_at,
        NUM_VALUES=unit.num_values,
        KEY_DIM=unit.key_dim,
        KEY_TILE=max(unit.key_dim, LEAST_SIZE),
        VALUE_DIM=unit.value_dim,
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        SEARCHES=searches,
        PRECISION="ieee" if is_wide else "tf32",
        ROUNDS=not is_wide,
        DEPENDENT=dependent,
        num_warps=4,
        num_stages=1,
        **launch_options(dependent),
    )
    return rows


@triton.jit
def as_products(b_x):
    """The numbers [N, N] where the matrix unit puts its products: a thread then has some rows'
    numbers of a few neighbouring columns, and adds a row without the other warps."""
    b_zero = tl.zeros((b_x.shape[0], 16), tl.bfloat16)
    return tl.dot(b_zero, tl.trans(b_zero), b_x)


@triton.jit
def _row_of(b_lower, p_lower, stride, first, end, i, NEIGHBOURS: tl.constexpr):
    """Row i of L, or zeros, which change nothing, where it is not one of those from `first` to
    `end`."""
    o_t = tl.arange(0, b_lower.shape[0])
    is_new = (i >= first) & (i < end)
    if NEIGHBOURS:
        return tl.sum(tl.where((o_t == i)[:, None] & is_new, b_lower, 0.0), axis=0)
    return tl.load(p_lower + i * stride + o_t, mask=is_new & (o_t >= 0), other=0.0)


@triton.jit
def _solved(b_inverse, b_lower, p_lower, stride, is_own, first, end, NEIGHBOURS: tl.constexpr):
    """The inverse with its rows from `first` to `end`, which are those of the identity before.
    Rows of L go to memory, from where each thread reads what it needs; NOTE: rows of neighbours
    belong to other programs, so that those are taken from registers."""
    o_t = tl.arange(0, b_inverse.shape[0])
    if not NEIGHBOURS:
        p_own = p_lower + o_t[:, None].to(tl.int64) * stride + o_t[None, :]
        tl.store(p_own, b_lower, mask=is_own[:, None])
        tl.debug_barrier()
    b_turned = as_products(tl.trans(b_inverse))
    # Rows of neighbours are few, and their row of L costs an exchange between the warps.
    GROUP: tl.constexpr = 1 if NEIGHBOURS else MOST_AT_ONCE
    begin = first // GROUP * GROUP
    b_next = _row_of(b_lower, p_lower, stride, first, end, begin, NEIGHBOURS)
    for base in range(begin, end, GROUP):
        b_group = tl.where(o_t // GROUP == base // GROUP, 1.0, 0.0)
        for j in tl.static_range(GROUP):
            b_row = b_next
            b_next = _row_of(b_lower, p_lower, stride, first, end, base + j + 1, NEIGHBOURS)
            b_change = tl.sum(b_row[None, :] * b_turned, axis=1)
            # Multiplies by ones and zeros: predicates of a condition would be computed one after
            # another.
            b_one = tl.where(o_t % GROUP == j, b_group, 0.0)
            b_turned -= b_change[:, None] * b_one[None, :]
    return tl.trans(b_turned)


@triton.jit(do_not_specialize=["num_rows"])
def _inverse_rows(
    p_rows,
    p_gates,
    p_lower,
    p_inverse,
    p_weights,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    num_rows,
    stride_row,
    stride_gate,
    stride_lower,
    stride_out,
    stride_head,
    stride_page,
    stride_table,
    first_unit,
    tails_per_page,
    tail_bytes,
    GATES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    SEARCHES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    CHANNELS: tl.constexpr = 2 * KEY_DIM + NUM_VALUES * VALUE_DIM
    i_row, i_first, i_end = span_of(p_starts, p_ends, num_rows, BLOCK, True, SEARCHES)
    i_value = tl.program_id(1)
    i_of_head = i_value % NUM_VALUES
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    if end <= start:
        return
    read = first_read(p_first, p_starts, p_ends, stride_table, i_row, start, end, BLOCK, NEIGHBOURS)
    read_token = token + read - start
    before = start // BLOCK * BLOCK
    unit = first_unit + i_value // NUM_VALUES
    p_unit = tail_address(
        p_pages, p_first, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    p_next = tail_address(
        p_pages, p_last, stride_table, stride_page, i_row, unit, tails_per_page, tail_bytes
    )
    elements = tl.pointer_type(p_rows.dtype.element_ty)
    floats = tl.pointer_type(tl.float32)
    p_keys = (p_unit + KEYS_AT).to(elements, bitcast=True)
    p_kept_gates = (p_unit + GATES_AT).to(floats, bitcast=True) + 2 * i_of_head
    p_kept = (p_unit + ROWS_AT).to(floats, bitcast=True) + i_of_head * BLOCK * BLOCK
    p_next_kept = (p_next + ROWS_AT).to(floats, bitcast=True) + i_of_head * BLOCK * BLOCK
    p_query = p_rows + i_value // NUM_VALUES * CHANNELS
    p_gate = p_gates + 2 * i_value
    o_t = tl.arange(0, BLOCK)
    o_k = tl.arange(0, KEY_TILE)
    num_blocks = (end - before + BLOCK - 1) // BLOCK
    for i_block in range(i_first, tl.minimum(i_end, num_blocks)):
        border = before + i_block * BLOCK
        o_position = border + o_t
        b_key = load_rows(
            p_query + KEY_DIM,
            stride_row,
            p_keys,
            o_position,
            o_k,
            read,
            end,
            read_token,
            before,
            KEY_DIM,
            KEY_DIM,
            KEY_DIM,
        )
        is_own = (o_position >= start) & (o_position < end)
        o_token = (token + o_position - start).to(tl.int64)
        p_own = p_query + o_token[:, None] * stride_row + o_k[None, :]
        b_query = tl.load(p_own, mask=is_own[:, None] & (o_k < KEY_DIM)[None, :], other=0.0)
        b_decay = load_gate(
            p_gate,
            stride_gate,
            p_kept_gates,
            o_position,
            read,
            end,
            read_token,
            before,
            2 * NUM_VALUES,
        )
        b_share = load_gate(
            p_gate + 1,
            stride_gate,
            p_kept_gates + 1,
            o_position,
            read,
            end,
            read_token,
            before,
            2 * NUM_VALUES,
        )
        b_sum = tl.cumsum(b_decay, 0)
        is_seen = o_t[:, None] >= o_t[None, :]
        b_left = tl.exp(tl.where(is_seen, b_sum[:, None] - b_sum[None, :], -float("inf")))
        is_earlier = o_t[:, None] > o_t[None, :]
        b_gap = tl.exp(tl.where(is_earlier, b_sum[:, None] - b_sum[None, :], -float("inf")))
        b_lower = dot(b_key, tl.trans(b_key), PRECISION, ROUNDS) * b_gap * b_share[:, None]
        # Rows of tokens before the pass, and of those that are to come.
        o_cell = o_t[:, None] * BLOCK + o_t[None, :]
        is_kept = (o_position < read)[:, None] & (o_cell >= 0)
        b_one = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
        b_inverse = tl.where(is_kept, tl.load(p_kept + o_cell, mask=is_kept, other=0.0), b_one)
        p_row = p_lower + (token + border - start).to(tl.int64) * stride_lower + i_value * BLOCK
        b_inverse = _solved(
            b_inverse,
            b_lower,
            p_row,
            stride_lower,
            is_own,
            tl.maximum(read - border, 0),
            tl.minimum(end - border, BLOCK),
            NEIGHBOURS,
        )
        b_weight = dot(b_query, tl.trans(b_key), PRECISION, ROUNDS) * b_left
        b_weight = dot(b_weight, b_inverse, PRECISION, ROUNDS)
        if not NEIGHBOURS:
            tl.debug_barrier()
        o_out = o_token[:, None] * stride_out + i_value * stride_head + o_t[None, :]
        dtype: tl.constexpr = p_inverse.dtype.element_ty
        tl.store(p_inverse + o_out, b_inverse.to(dtype), mask=is_own[:, None])
        tl.store(p_weights + o_out, b_weight.to(dtype), mask=is_own[:, None])
        if i_block == 0:
            tl.store(p_kept + o_cell, b_inverse, mask=is_own[:, None])
        elif border == end // BLOCK * BLOCK:
            tl.store(p_next_kept + o_cell, b_inverse, mask=is_own[:, None])
