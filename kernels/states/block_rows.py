"""Rows of a batch in kernels of state layers on a GPU: their units in pages, and tokens of a block,
which are in the batch or, those before the pass, in the tail of a state."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_SIZE = 64
"""Least number of columns of a tile; smaller heads are padded. NOTE: products of bfloat16 with 32
columns are wrong or fail on an H200 (Triton 3.6)."""

ROWS_AT_ONCE = tl.constexpr(128)
"""Rows that a turn of a loop looks through."""
MOST_SPANS = tl.constexpr(1 << 20)
"""More spans than a row has."""


@triton.jit
def dot(b_x, b_y, PRECISION: tl.constexpr, ROUNDS: tl.constexpr):
    if ROUNDS:
        return tl.dot(b_x.to(tl.bfloat16), b_y.to(tl.bfloat16))
    return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), input_precision=PRECISION)


@triton.jit
def tail_address(p_pages, p_table, stride_table, stride_page, i_row, unit, per_page, tail_bytes):
    """Address of a unit's tail in the row's pages."""
    page = tl.load(p_table + i_row * stride_table + unit // per_page).to(tl.int64)
    return p_pages + page * stride_page + (unit % per_page).to(tl.int64) * tail_bytes


@triton.jit
def span_of(
    p_starts, p_ends, num_rows, SIZE: tl.constexpr, ALIGNED: tl.constexpr, SEARCHES: tl.constexpr
):
    """Row of a program, number of its span in the row, and that of the span behind it. Rows have
    spans of SIZE tokens one after another, which begin at their starts, or at borders if ALIGNED.
    Programs behind the last span get numbers that the last row does not have. Without SEARCHES a
    program has all spans of a row.

    Steps have room for more rows than they have: as many programs for each as for a long one take
    longer to start than that one to run."""
    i = tl.program_id(0)
    i_row = i
    before = i
    count = MOST_SPANS
    if SEARCHES:
        count = 1
        i_row = 0
        before = 0
        behind = 0
        for first in range(0, num_rows, ROWS_AT_ONCE):
            o_row = first + tl.arange(0, ROWS_AT_ONCE)
            b_start = tl.load(p_starts + o_row, mask=o_row < num_rows, other=0)
            b_end = tl.load(p_ends + o_row, mask=o_row < num_rows, other=0)
            b_origin = b_start // SIZE * SIZE if ALIGNED else b_start
            b_count = tl.where(b_end > b_start, (b_end - b_origin + SIZE - 1) // SIZE, 0)
            b_behind = behind + tl.cumsum(b_count, 0)
            is_before = (b_behind <= i) & (o_row < num_rows - 1)
            i_row += tl.sum(is_before.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, b_behind, 0), 0))
            behind += tl.sum(b_count, 0)
    return i_row.to(tl.int64), i - before, i - before + count


@triton.jit
def floats(p):
    """The address as one of float32."""
    return p.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def piece_addresses(
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
    per_page,
    piece_bytes,
):
    """Addresses of a piece of a state, as ones of float32, in the row's first and last set; see
    `SetLayout`. pieces_behind is at least 1."""
    is_behind = piece < num_behind
    number = tl.maximum(piece - num_behind, 0)
    page = tl.where(is_behind, piece // pieces_behind, num_tail_pages + number // per_page)
    at_behind = pieces_at + piece % pieces_behind * piece_bytes
    at = tl.where(is_behind, at_behind, number % per_page * piece_bytes)
    o_page = i_row * stride_table + page
    first_page = tl.load(p_first + o_page).to(tl.int64)
    last_page = tl.load(p_last + o_page).to(tl.int64)
    p_piece = p_pages + at
    return floats(p_piece + first_page * stride_page), floats(p_piece + last_page * stride_page)


@triton.jit
def _num_neighbours(p_first, p_last, p_starts, p_ends, stride_table, i_row, BEFORE: tl.constexpr):
    """Rows of one token before a row, at most `BEFORE`, that are of the same sequence: each ends
    where the next one starts, with the same state."""
    count = 0
    for i in tl.static_range(BEFORE):
        row = tl.maximum(i_row - i - 1, 0)
        end = tl.load(p_ends + row)
        after = tl.minimum(row + 1, i_row)
        is_next = (count == i) & (i_row > i) & (end == tl.load(p_starts + after))
        is_next = is_next & (end == tl.load(p_starts + row) + 1)
        state = tl.load(p_last + row * stride_table)
        is_next = is_next & (state == tl.load(p_first + after * stride_table))
        count += is_next.to(tl.int32)
    return count


@triton.jit
def oldest_neighbour(
    p_pages,
    p_first,
    p_last,
    p_starts,
    p_ends,
    stride_table,
    stride_page,
    i_row,
    unit,
    per_page,
    tail_bytes,
    BEFORE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Number of the rows before a row, at most `BEFORE`, whose tokens its convolution reads in the
    batch, and address of the unit of the first of them. Tokens before these are in the tail of that
    one's block."""
    count = 0
    if NEIGHBOURS:
        count = _num_neighbours(p_first, p_last, p_starts, p_ends, stride_table, i_row, BEFORE)
    p_unit = tail_address(
        p_pages, p_first, stride_table, stride_page, i_row - count, unit, per_page, tail_bytes
    )
    return count, p_unit


@triton.jit
def first_read(
    p_first,
    p_starts,
    p_ends,
    stride_table,
    i_row,
    start,
    end,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """First position of a row's block that the batch has. For a row of one token that is the
    position of the first of the neighbours before it: rows of one token with the same state, each
    of which ends where the next one starts."""
    count = 0
    if NEIGHBOURS:
        state = tl.load(p_first + i_row * stride_table)
        is_next = end == start + 1
        while is_next:
            row = tl.maximum(i_row - count - 1, 0)
            is_next = (i_row > count) & (start - count > start // BLOCK * BLOCK)
            is_next = is_next & (tl.load(p_ends + row) == start - count)
            is_next = is_next & (tl.load(p_starts + row) == start - count - 1)
            is_next = is_next & (tl.load(p_first + row * stride_table) == state)
            count += is_next.to(tl.int32)
    return start - count


@triton.jit
def load_rows(
    p_own,
    stride_own,
    p_kept,
    o_position,
    o_d,
    start,
    end,
    token,
    before,
    size,
    kept_size,
    STRIDE: tl.constexpr,
):
    """Rows [positions, numbers] of the batch's tokens from `start` to `end`, and `kept_size`
    numbers of those before them from the tail of the block that begins at `before`. Zeros
    elsewhere."""
    inside = (o_d < size)[None, :]
    o_token = (token + o_position - start).to(tl.int64)
    is_own = ((o_position >= start) & (o_position < end))[:, None] & inside
    b_own = tl.load(p_own + o_token[:, None] * stride_own + o_d[None, :], mask=is_own, other=0.0)
    is_kept = (o_position < start)[:, None] & (o_d < kept_size)[None, :]
    p_row = p_kept + (o_position - before)[:, None] * STRIDE + o_d[None, :]
    return tl.where(is_own, b_own, tl.load(p_row, mask=is_kept, other=0.0))


@triton.jit
def load_gate(
    p_own, stride_own, p_kept, o_position, start, end, token, before, STRIDE: tl.constexpr
):
    """One gate of tokens [positions], as `load_rows`."""
    o_token = (token + o_position - start).to(tl.int64)
    is_own = (o_position >= start) & (o_position < end)
    b_own = tl.load(p_own + o_token * stride_own, mask=is_own, other=0.0)
    p_gate = p_kept + (o_position - before) * STRIDE
    return b_own + tl.load(p_gate, mask=o_position < start, other=0.0)


@triton.jit
def load_inputs(
    p_own,
    stride_own,
    p_tail,
    o_position,
    o_d,
    start,
    end,
    token,
    before,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    IS_INNER: tl.constexpr = False,
):
    """Inputs of a convolution [positions, numbers]: of the batch's tokens, and of those before them
    from the tail of the block that begins at `before`, which begins with those of `BEFORE` tokens
    before it. Zeros before a sequence. IS_INNER: all are the batch's."""
    o_token = (token + o_position - start).to(tl.int64)
    p_token = p_own + o_token[:, None] * stride_own + o_d[None, :]
    if IS_INNER:
        return tl.load(p_token)
    is_own = (o_position >= start) & (o_position < end)
    b_own = tl.load(p_token, mask=is_own[:, None], other=0.0)
    is_kept = (o_position >= 0) & (o_position < start)
    o_row = o_position - before + BEFORE
    p_row = p_tail + o_row[:, None] * CHANNELS + o_d[None, :]
    return tl.where(is_own[:, None], b_own, tl.load(p_row, mask=is_kept[:, None], other=0.0))


@triton.jit
def convolved(
    p_own,
    stride_own,
    p_taps,
    p_tail,
    b_bias,
    o_position,
    o_d,
    start,
    end,
    token,
    before,
    TAP_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    IS_INNER: tl.constexpr = False,
):
    """Inputs as of `load_inputs`, and the SiLU of their convolution in float32, [positions,
    numbers]."""
    b_sum = tl.zeros((o_position.shape[0], o_d.shape[0]), tl.float32) + b_bias[None, :]
    for i in tl.static_range(BEFORE + 1):
        b_x = load_inputs(
            p_own,
            stride_own,
            p_tail,
            o_position - BEFORE + i,
            o_d,
            start,
            end,
            token,
            before,
            CHANNELS,
            BEFORE,
            IS_INNER,
        )
        # Each thread loads the taps of its own numbers: none are exchanged.
        p_tap = p_taps + i * TAP_STRIDE + o_d[None, :] + tl.zeros_like(o_position)[:, None]
        b_sum += b_x.to(tl.float32) * tl.load(p_tap)
    return b_x, b_sum / (1 + tl.exp(-b_sum))


@triton.jit
def store_rows(
    p_first, p_last, b_x, o_row, o_last_row, o_d, is_first, is_last, STRIDE: tl.constexpr
):
    """Stores rows [positions, numbers] to the tails of the first and the last block."""
    p_row = p_first + o_row[:, None] * STRIDE + o_d[None, :]
    tl.store(p_row, b_x, mask=is_first[:, None])
    p_row = p_last + o_last_row[:, None] * STRIDE + o_d[None, :]
    tl.store(p_row, b_x, mask=is_last[:, None])


@triton.jit
def clear(p_out, size, is_cleared, COLUMNS: tl.constexpr):
    """Zeros in the place of a program's outputs, where they are cleared."""
    o_d = tl.arange(0, COLUMNS)
    b_zero = tl.zeros([COLUMNS], tl.float32).to(p_out.dtype.element_ty)
    tl.store(p_out + o_d, b_zero, mask=(o_d < size) & is_cleared)


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), of small results exact in proportion."""
    b_y = tl.exp(tl.minimum(b_x, 20.0))
    b_u = 1 + b_y
    b_log = tl.where(b_u == 1.0, b_y, tl.log(b_u) * (b_y / tl.where(b_u == 1.0, 1.0, b_u - 1)))
    return tl.where(b_x > 20.0, b_x, b_log)
