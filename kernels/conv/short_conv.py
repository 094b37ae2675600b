"""A layer of a short causal convolution between its projections, on a GPU, over states in pages.
Twin: `conv_twin`.

A gated input is rounded to an element before anything reads it, so that a token has the same bits
whether the inputs before it are of the same pass or of a state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..states.block_rows import clear, oldest_neighbour, span_of, tail_address
from ..states.state_memory import StateMemory
from .conv_layer import ConvLayer

TILE = 16
"""Tokens that a program takes at once, of rows of several."""
TOKENS = 64
"""Tokens of a row that a program computes, where rows have several."""


def short_conv(
    parts: torch.Tensor, layer: ConvLayer, memory: StateMemory, *, are_neighbours: bool = False
) -> torch.Tensor:
    """parts [T, 3 H] of the rows of a batch: gates of the inputs, gates of the outputs, and inputs
    of each token → [T, H]; of tokens of no row zeros. Reads the states of the rows' first blocks,
    appends to them, and writes those of their last blocks. `are_neighbours`: rows of one token may
    be successive tokens of a sequence, at most as many as a block has."""
    assert parts.stride(1) == 1
    unit = layer.unit
    num_tokens = len(parts)
    num_rows = len(memory.starts)
    # Padding must stay a number: what is drawn of it is a token of the next step's padding.
    made = parts.new_empty if memory.has_tokens else parts.new_zeros
    out = made(num_tokens, layer.taps.shape[1])
    # Where there are as many rows as tokens, each has one.
    has_tokens = num_rows == num_tokens
    programs = num_rows if has_tokens else num_rows + num_tokens // TOKENS
    _short_conv[(programs, layer.num_units)](
        parts,
        layer.taps,
        out,
        memory.pages,
        memory.first,
        memory.last,
        memory.starts,
        memory.ends,
        memory.tokens,
        num_rows,
        parts.stride(0),
        out.stride(0),
        memory.pages.stride(0),
        memory.first.stride(0),
        memory.first_unit,
        memory.layout.tails_per_page,
        memory.layout.tail_bytes,
        NUM_UNITS=layer.num_units,
        CHANNELS=unit.num_channels,
        WIDTH=unit.width,
        BEFORE_TILE=triton.next_power_of_2(unit.num_before),
        BLOCK=unit.block_size,
        NEIGHBOURS=are_neighbours,
        CLEARS=memory.has_tokens,
        SEARCHES=not has_tokens,
        TOKENS=TOKENS,
        TILE=1 if has_tokens else TILE,
        num_warps=1 if has_tokens else 4,
    )
    return out


@triton.jit
def _gated_inputs(
    p_own,
    stride_own,
    p_tail,
    o_position,
    o_d,
    start,
    end,
    token,
    before,
    BEFORE: tl.constexpr,
    CHANNELS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Gated inputs [positions, channels]: of the batch's tokens, and of those before them from the
    tail of the block that begins at `before`. Zeros before a sequence."""
    is_own = ((o_position >= start) & (o_position < end))[:, None]
    o_token = (token + o_position - start).to(tl.int64)
    p_token = p_own + o_token[:, None] * stride_own + o_d[None, :]
    b_gate = tl.load(p_token, mask=is_own, other=0.0).to(tl.float32)
    b_x = tl.load(p_token + 2 * HIDDEN, mask=is_own, other=0.0).to(tl.float32)
    b_own = (b_gate * b_x).to(p_own.dtype.element_ty)
    is_kept = ((o_position >= 0) & (o_position < start))[:, None]
    p_row = p_tail + (o_position - before + BEFORE)[:, None] * CHANNELS + o_d[None, :]
    return tl.where(is_own, b_own, tl.load(p_row, mask=is_kept, other=0.0))


@triton.jit(do_not_specialize=["num_rows"])
def _short_conv(
    p_parts,
    p_taps,
    p_out,
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    p_tokens,
    num_rows,
    stride_part,
    stride_out,
    stride_page,
    stride_table,
    first_unit,
    tails_per_page,
    tail_bytes,
    NUM_UNITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    CLEARS: tl.constexpr,
    SEARCHES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    BEFORE: tl.constexpr = WIDTH - 1
    HIDDEN: tl.constexpr = NUM_UNITS * CHANNELS
    i_row, span, end_span = span_of(p_starts, p_ends, num_rows, TOKENS, False, SEARCHES)
    i_unit = tl.program_id(1)
    column = i_unit * CHANNELS
    start = tl.load(p_starts + i_row)
    end = tl.load(p_ends + i_row)
    token = tl.load(p_tokens + i_row)
    p_cleared = p_out + token.to(tl.int64) * stride_out + column
    clear(p_cleared, CHANNELS, (end <= start) & CLEARS, CHANNELS)
    if end <= start:
        return
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
    elements = tl.pointer_type(p_parts.dtype.element_ty)
    p_read = p_oldest.to(elements, bitcast=True)
    p_tail = p_unit.to(elements, bitcast=True)
    p_next_tail = p_next.to(elements, bitcast=True)
    p_own = p_parts + column
    o_d = tl.arange(0, CHANNELS)
    num_tiles = (end - start + TILE - 1) // TILE
    end_tile = tl.minimum(num_tiles, end_span * (TOKENS // TILE))
    for tile in range(span * (TOKENS // TILE), end_tile):
        o_position = start + tile * TILE + tl.arange(0, TILE)
        is_own = (o_position < end)[:, None]
        o_token = (token + o_position - start).to(tl.int64)[:, None]
        b_sum = tl.zeros((TILE, CHANNELS), tl.float32)
        for i in tl.static_range(WIDTH):
            b_x = _gated_inputs(
                p_own,
                stride_part,
                p_read,
                o_position - BEFORE + i,
                o_d,
                oldest,
                end,
                first_read,
                read_before,
                BEFORE,
                CHANNELS,
                HIDDEN,
            )
            b_tap = tl.load(p_taps + i * HIDDEN + column + o_d)
            b_sum += b_x.to(tl.float32) * b_tap[None, :]
        p_gate = p_own + HIDDEN + o_token * stride_part + o_d[None, :]
        b_out = tl.load(p_gate, mask=is_own, other=0.0).to(tl.float32) * b_sum
        p_row = p_out + o_token * stride_out + column + o_d[None, :]
        tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=is_own)
        o_row = (o_position - before)[:, None]
        tl.store(
            p_tail + (o_row + BEFORE) * CHANNELS + o_d[None, :], b_x, mask=is_own & (o_row < BLOCK)
        )
        # The inputs before a border too are in the tail behind it.
        o_row = (o_position - border)[:, None]
        is_near = is_own & crosses & (o_row >= -BEFORE)
        tl.store(p_next_tail + (o_row + BEFORE) * CHANNELS + o_d[None, :], b_x, mask=is_near)
    if crosses & (span == 0):
        # Inputs of tokens before the pass that are near the border.
        o_position = border - BEFORE + tl.arange(0, BEFORE_TILE)
        b_x = _gated_inputs(
            p_own,
            stride_part,
            p_read,
            o_position,
            o_d,
            oldest,
            start,
            first_read,
            read_before,
            BEFORE,
            CHANNELS,
            HIDDEN,
        )
        is_kept = ((o_position < start) & (o_position < border))[:, None]
        p_near = p_next_tail + (o_position - border + BEFORE)[:, None] * CHANNELS + o_d[None, :]
        tl.store(p_near, b_x, mask=is_kept)
