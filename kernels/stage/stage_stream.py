"""The residual stream from one pipeline stage to the next, and sampled tokens from the last stage
to the others, over memory that GPUs reach (`stage_memory`). Launches only, so that graphs can hold
streams.

A launch that receives waits until its counterpart on the other stage has sent, and one that sends a
stream until the slot that it writes to has been read; both give up after a while, which ends the
process. The n-th stream that a lane sends is the n-th that it receives: both stages launch the same
numbers of rows in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..peer.peer_memory import fetched, stop_unless_over, written
from ..peer.plain_words import await_number, await_words, put_word, settle
from .stage_memory import (
    ARRIVED,
    HEADER,
    LAST_TOKENS,
    NUM_LANES,
    NUM_SLOTS,
    RECEIVED,
    SENT,
    TAKEN,
    StageMemory,
)

MOST_NUMBERS = 1 << 30
"""Messages of tokens are numbered from 1 and begin again behind so many; 0 is that of an empty
slot."""


def options(memory: StageMemory, most: int, tensor: torch.Tensor) -> dict[str, int]:
    """Constants of a kernel whose programs pass up to `most` numbers at once."""
    return {"HOST": memory.is_host, "BLOCK": triton.next_power_of_2(most), "ON_GPU": tensor.is_cuda}


def send_stream(memory: StageMemory, stream: torch.Tensor) -> None:
    """Sends the stream [T, H] to the next stage."""
    assert stream.nbytes <= memory.sizes.stream_bytes
    _launch_stream(_send_stream, memory, stream, memory.behind)


def receive_stream(memory: StageMemory, stream: torch.Tensor) -> None:
    """Fills the stream [T, H] with what the stage before has sent."""
    _launch_stream(_receive_stream, memory, stream, memory.before)


def _launch_stream(kernel: Any, memory: StageMemory, stream: torch.Tensor, other: int) -> None:
    num_tokens, hidden = stream.shape
    assert stream.is_contiguous()
    kernel[(min(num_tokens, NUM_LANES.value),)](
        stream,
        memory.own,
        other,
        num_tokens,
        hidden,
        memory.sizes.stream_bytes,
        memory.max_polls,
        **options(memory, hidden, stream),
    )


def send_tokens(
    memory: StageMemory,
    number: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Tells all other stages message `number`: the token int32 [S] that stands after each position
    int32 [S] of rows int32 [S] of the table, negative for padding."""
    most = memory.sizes.most_positions
    _launch_message(
        _send_tokens, memory, number, len(rows), most, rows, positions, token_ids, is_sent=True
    )


def receive_tokens(memory: StageMemory, number: int, count: int, token_table: torch.Tensor) -> None:
    """Writes the `count` tokens of message `number`, made by `send_tokens`, to token_table int32
    [rows, …]."""
    most = memory.sizes.most_positions
    _launch_message(
        _receive_tokens,
        memory,
        number,
        count,
        most,
        token_table,
        token_table.stride(0),
        is_sent=False,
    )


def send_ends(
    memory: StageMemory,
    number: int,
    rows: torch.Tensor,
    known: torch.Tensor,
    token_table: torch.Tensor,
) -> None:
    """Tells all other stages message `number`: of each of rows int32 [R] of the table, negative for
    padding, how many tokens are known (known int32 [rows]), and the last of them in token_table
    int32 [rows, …]."""
    table = token_table, token_table.stride(0)
    most = memory.sizes.most_rows
    _launch_message(
        _send_ends,
        memory,
        number,
        len(rows),
        most,
        rows,
        known,
        *table,
        is_sent=True,
        LAST=LAST_TOKENS,
    )


def receive_ends(
    memory: StageMemory, number: int, count: int, known: torch.Tensor, token_table: torch.Tensor
) -> None:
    """Writes message `number` of `count` rows, made by `send_ends`, to `known` and
    `token_table`."""
    table = token_table, token_table.stride(0)
    most = memory.sizes.most_rows
    _launch_message(
        _receive_ends, memory, number, count, most, known, *table, is_sent=False, LAST=LAST_TOKENS
    )


def _launch_message(
    kernel: Any,
    memory: StageMemory,
    number: int,
    count: int,
    most: int,
    *arguments: Any,
    is_sent: bool,
    **constants: int,
) -> None:
    """Sends message `number` of `count` entries, `most` at most, to all other stages, or receives
    it. The first of the arguments is a tensor."""
    assert count <= most
    offset = memory.message_at(number)
    constants |= options(memory, most, arguments[0])
    if is_sent:
        grid = (len(memory.others),)
        kernel[grid](*arguments, memory.others, offset, number, count, **constants)
    else:
        kernel[(1,)](memory.own + offset, number, count, *arguments, memory.max_polls, **constants)


@triton.jit
def _count(piece, KIND: tl.constexpr, i_lane):
    """Pointer to a lane's count."""
    return piece.to(tl.pointer_type(tl.int32)) + KIND * NUM_LANES + i_lane


@triton.jit
def await_count(p_count, least, max_polls, HOST: tl.constexpr, ON_GPU: tl.constexpr):
    """Returns when another stage has counted up to `least`. What it wrote before is there then."""
    if HOST:
        await_words(p_count, 4, 1, least, max_polls, ON_GPU)
    else:
        _await_atomics(p_count, least, max_polls, ON_GPU)


@triton.jit
def _await_atomics(p_count, least, max_polls, ON_GPU: tl.constexpr):
    # Differences, which are right when both have wrapped.
    num_missing = least - tl.atomic_add(p_count, 0, sem="acquire", scope="sys")
    polls = 0
    while (num_missing > 0) & (polls < max_polls):
        num_missing = least - tl.atomic_add(p_count, 0, sem="acquire", scope="sys")
        polls += 1
    stop_unless_over(num_missing, ON_GPU)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["own", "behind", "num_tokens"])
def _send_stream(
    p_stream,
    own,
    behind,
    num_tokens,
    hidden,
    stream_bytes,
    max_polls,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_lane = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    p_sent = _count(own, SENT, i_lane)
    number = tl.load(p_sent) + 1
    await_count(_count(own, TAKEN, i_lane), number - NUM_SLOTS, max_polls, HOST, ON_GPU)
    slot = behind + HEADER + (number & 1).to(tl.int64) * stream_bytes
    p_slot = slot.to(tl.pointer_type(p_stream.dtype.element_ty))
    i_row = i_lane.to(tl.int64)
    while i_row < num_tokens:
        b_row = tl.load(p_stream + i_row * hidden + o_h, mask=inside, other=0.0)
        written(p_slot + i_row * hidden + o_h, b_row, inside, HOST)
        i_row += NUM_LANES
    say_count(_count(behind, ARRIVED, i_lane), number, HOST, ON_GPU)
    tl.store(p_sent, number)


@triton.jit(do_not_specialize=["own", "before", "num_tokens"])
def _receive_stream(
    p_stream,
    own,
    before,
    num_tokens,
    hidden,
    stream_bytes,
    max_polls,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_lane = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    p_received = _count(own, RECEIVED, i_lane)
    number = tl.load(p_received) + 1
    await_count(_count(own, ARRIVED, i_lane), number, max_polls, HOST, ON_GPU)
    slot = own + HEADER + (number & 1).to(tl.int64) * stream_bytes
    p_slot = slot.to(tl.pointer_type(p_stream.dtype.element_ty))
    i_row = i_lane.to(tl.int64)
    while i_row < num_tokens:
        b_row = fetched(p_slot + i_row * hidden + o_h, inside, HOST)
        tl.store(p_stream + i_row * hidden + o_h, b_row, mask=inside)
        i_row += NUM_LANES
    say_count(_count(before, TAKEN, i_lane), number, HOST, ON_GPU)
    tl.store(p_received, number)


@triton.jit(do_not_specialize=["first", "number", "count"])
def _send_tokens(
    p_row,
    p_position,
    p_token,
    p_piece,
    first,
    number,
    count,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = (tl.load(p_piece + tl.program_id(0)) + first).to(tl.pointer_type(tl.int32))
    o_s = tl.arange(0, BLOCK)
    inside = o_s < count
    written(p_message + 1 + o_s, tl.load(p_row + o_s, mask=inside, other=-1), inside, HOST)
    written(
        p_message + 1 + count + o_s, tl.load(p_position + o_s, mask=inside, other=0), inside, HOST
    )
    written(
        p_message + 1 + 2 * count + o_s, tl.load(p_token + o_s, mask=inside, other=0), inside, HOST
    )
    say_number(p_message, number, HOST, ON_GPU)


@triton.jit(do_not_specialize=["message", "number", "count"])
def _receive_tokens(
    message,
    number,
    count,
    p_table,
    stride_table,
    max_polls,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = message.to(tl.pointer_type(tl.int32))
    await_message(p_message, number, max_polls, HOST, ON_GPU)
    o_s = tl.arange(0, BLOCK)
    inside = o_s < count
    b_row = tl.where(inside, fetched(p_message + 1 + o_s, inside, HOST), -1)
    b_position = fetched(p_message + 1 + count + o_s, inside, HOST)
    b_token = fetched(p_message + 1 + 2 * count + o_s, inside, HOST)
    tl.store(p_table + b_row.to(tl.int64) * stride_table + b_position + 1, b_token, mask=b_row >= 0)


@triton.jit(do_not_specialize=["first", "number", "count"])
def _send_ends(
    p_row,
    p_known,
    p_table,
    stride_table,
    p_piece,
    first,
    number,
    count,
    HOST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = (tl.load(p_piece + tl.program_id(0)) + first).to(tl.pointer_type(tl.int32))
    o_r = tl.arange(0, BLOCK)
    inside = o_r < count
    b_row = tl.load(p_row + o_r, mask=inside, other=-1)
    b_known = tl.load(p_known + b_row, mask=b_row >= 0, other=0)
    written(p_message + 1 + o_r, b_row, inside, HOST)
    written(p_message + 1 + count + o_r, b_known, inside, HOST)
    for i in range(LAST):
        b_at = b_known - 1 - i
        is_there = (b_row >= 0) & (b_at >= 0)
        b_token = tl.load(
            p_table + b_row.to(tl.int64) * stride_table + b_at, mask=is_there, other=0
        )
        written(p_message + 1 + (2 + i) * count + o_r, b_token, inside, HOST)
    say_number(p_message, number, HOST, ON_GPU)


@triton.jit(do_not_specialize=["message", "number", "count"])
def _receive_ends(
    message,
    number,
    count,
    p_known,
    p_table,
    stride_table,
    max_polls,
    HOST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = message.to(tl.pointer_type(tl.int32))
    await_message(p_message, number, max_polls, HOST, ON_GPU)
    o_r = tl.arange(0, BLOCK)
    inside = o_r < count
    b_row = tl.where(inside, fetched(p_message + 1 + o_r, inside, HOST), -1)
    b_known = fetched(p_message + 1 + count + o_r, inside, HOST)
    tl.store(p_known + b_row, b_known, mask=b_row >= 0)
    for i in range(LAST):
        b_at = b_known - 1 - i
        is_there = (b_row >= 0) & (b_at >= 0)
        b_token = fetched(p_message + 1 + (2 + i) * count + o_r, inside, HOST)
        tl.store(p_table + b_row.to(tl.int64) * stride_table + b_at, b_token, mask=is_there)


@triton.jit
def say_count(p_count, number, HOST: tl.constexpr, ON_GPU: tl.constexpr):
    """Counts up to `number`, by one. What all threads of the block wrote is there before the count
    says so."""
    if HOST:
        settle(ON_GPU)
        put_word(p_count, number, ON_GPU)
    else:
        tl.debug_barrier()
        tl.atomic_add(p_count, 1, sem="release", scope="sys")


@triton.jit
def say_number(p_message, number, HOST: tl.constexpr, ON_GPU: tl.constexpr):
    """Like `say_count`, for the number of a message."""
    if HOST:
        settle(ON_GPU)
        put_word(p_message, number, ON_GPU)
    else:
        tl.debug_barrier()
        tl.atomic_xchg(p_message, number, sem="release", scope="sys")


@triton.jit
def await_message(p_message, number, max_polls, HOST: tl.constexpr, ON_GPU: tl.constexpr):
    """Returns when the message with that number lies there whole."""
    if HOST:
        await_number(p_message, number, max_polls, ON_GPU)
    else:
        _await_message_atomics(p_message, number, max_polls, ON_GPU)


@triton.jit
def _await_message_atomics(p_message, number, max_polls, ON_GPU: tl.constexpr):
    polls = 0
    is_missing = tl.atomic_add(p_message, 0, sem="acquire", scope="sys") != number
    while is_missing & (polls < max_polls):
        is_missing = tl.atomic_add(p_message, 0, sem="acquire", scope="sys") != number
        polls += 1
    stop_unless_over(is_missing.to(tl.int32), ON_GPU)
    tl.debug_barrier()
