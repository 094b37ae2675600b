"""Guesses of the first pipeline stage on their way to the others, over memory that GPUs reach
(`stage_memory`). Launches only. One that receives waits as those of `stage_stream` do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .peer_memory import fetched, written
from .stage_memory import StageMemory
from .stage_stream import await_message, options, say_number


def send_guesses(
    memory: StageMemory,
    number: int,
    steps: torch.Tensor,
    known: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
) -> None:
    """Tells all later stages message `number` of guesses: those that stand in token_table int32
    [rows, …] behind the last known token of each row of a step. `steps`, `known` and `positions` as
    in `draft_rows`, which comes later."""
    _send_guesses[(len(memory.others),)](
        steps,
        steps.stride(0),
        known,
        positions,
        token_table,
        token_table.stride(0),
        memory.others,
        memory.guesses_at(number),
        number,
        steps.shape[1],
        **options(memory, memory.sizes.most_rows, token_table),
    )


def receive_guesses(
    memory: StageMemory,
    number: int,
    steps: torch.Tensor,
    known: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
) -> None:
    """Writes message `number`, made by `send_guesses` of the same step, to the same places of this
    stage's table."""
    _receive_guesses[(1,)](
        steps,
        steps.stride(0),
        known,
        positions,
        token_table,
        token_table.stride(0),
        memory.own + memory.guesses_at(number),
        number,
        steps.shape[1],
        memory.max_polls,
        **options(memory, memory.sizes.most_rows, token_table),
    )


@triton.jit
def _places_of_guesses(p_step, stride_step, p_known, p_position, o_r, count):
    """Row of the table, negative for padding; place of its first guess; number of its guesses."""
    b_row = tl.load(p_step + o_r, mask=o_r < count, other=-1)
    is_live = b_row >= 0
    b_most = tl.load(p_step + 2 * stride_step + o_r, mask=is_live, other=0)
    b_first = tl.load(p_step + stride_step + o_r, mask=is_live, other=0)
    b_planned = tl.load(p_position + b_first, mask=is_live, other=0)
    follows = is_live & (tl.load(p_step + 3 * stride_step + o_r, mask=is_live, other=0) != 0)
    b_known = tl.load(p_known + b_row, mask=follows, other=1)
    return b_row, tl.where(follows, b_known, b_planned + 1), b_most


@triton.jit(do_not_specialize=["first", "number", "count"])
def _send_guesses(
    p_step,
    stride_step,
    p_known,
    p_position,
    p_table,
    stride_table,
    p_piece,
    first,
    number,
    count,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = (tl.load(p_piece + tl.program_id(0)) + first).to(tl.pointer_type(tl.int32))
    o_r = tl.arange(0, BLOCK)
    b_row, b_place, b_most = _places_of_guesses(
        p_step, stride_step, p_known, p_position, o_r, count
    )
    p_guess = p_table + b_row.to(tl.int64) * stride_table + b_place
    for i in range(tl.max(b_most)):
        b_token = tl.load(p_guess + i, mask=i < b_most, other=0)
        written(p_message + 1 + i * count + o_r, b_token, i < b_most, HOST)
    say_number(p_message, number, HOST, ON_GPU)


@triton.jit(do_not_specialize=["message", "number", "count"])
def _receive_guesses(
    p_step,
    stride_step,
    p_known,
    p_position,
    p_table,
    stride_table,
    message,
    number,
    count,
    max_polls,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    p_message = message.to(tl.pointer_type(tl.int32))
    await_message(p_message, number, max_polls, HOST, ON_GPU)
    o_r = tl.arange(0, BLOCK)
    b_row, b_place, b_most = _places_of_guesses(
        p_step, stride_step, p_known, p_position, o_r, count
    )
    p_guess = p_table + b_row.to(tl.int64) * stride_table + b_place
    for i in range(tl.max(b_most)):
        b_token = fetched(p_message + 1 + i * count + o_r, i < b_most, HOST)
        tl.store(p_guess + i, b_token, mask=i < b_most)
