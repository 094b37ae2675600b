"""Steps of a model that drafts tokens, beside the step of the served model that verifies them.

The words of both steps name the same rows. Where the host does not know the position of a row, both
hold the last position that it may have; the device moves the words to the true one, see
`draft_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draft_rows import StepWords, first_position

_BLOCK = 128
_STATE_BLOCK = 1024


def find_shifts(
    steps: torch.Tensor, known: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor
) -> None:
    """Writes each row's distance from its position in the verifying step's words, int32 [table
    rows]: 0 or less.

    `steps`, `known` and `positions` are those of `draft_rows`, which comes later.
    """
    _find_shifts[(steps.shape[1],)](steps, steps.stride(0), known, positions, shifts, num_warps=1)


def shift_words(shifts: torch.Tensor, words: StepWords) -> None:
    """Moves the words of a drafting step: positions, lengths of decoding tokens, and draws."""
    draws = words.draws
    most = max(len(words.rows), draws.shape[1])
    _shift_words[(triton.cdiv(most, _BLOCK),)](
        shifts,
        words.rows,
        words.positions,
        len(words.rows),
        words.seq_lens,
        len(words.seq_lens),
        draws,
        draws.stride(0),
        draws.shape[1],
        BLOCK=_BLOCK,
    )


def store_drafts(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    token_table: torch.Tensor,
    vocab_size: int,
) -> None:
    """Writes each row's token, int32 [S], behind its position; tokens of negative rows are dropped.
    A value that is no token, as may be drawn from logits that are not numbers, becomes a token."""
    store_drafts_and_advance(
        rows, positions, token_ids, token_table, vocab_size, rows, rows, rows, advance=-1
    )


def store_drafts_and_advance(
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    token_table: torch.Tensor,
    vocab_size: int,
    seq_lens: torch.Tensor,
    output_indices: torch.Tensor,
    num_left: torch.Tensor,
    *,
    behind: int = 1,
    advance: int = 1,
) -> None:
    """Writes tokens as `store_drafts`, `behind` places after the position, which moves on by
    `advance`; the words int32 [S] become those of the next draft. num_left int32 [S]: drafts of
    each row, this one included; a row with no drafts left becomes padding. `advance` −1: only
    tokens are written."""
    _store_drafts[(triton.cdiv(len(rows), _BLOCK),)](
        rows,
        positions,
        token_ids,
        token_table,
        token_table.stride(0),
        vocab_size,
        seq_lens,
        output_indices,
        num_left,
        len(rows),
        BEHIND=behind,
        ADVANCE=advance,
        BLOCK=_BLOCK,
    )


def keep_states(
    steps: torch.Tensor,
    known: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor,
) -> None:
    """Keeps, for each row that gained tokens, the hidden state at the position before its last
    known token: hidden [tokens, H] of the step → states [table rows, H]. `steps`, `known` and
    `positions` as `draft_rows` and `store_drafted` left them."""
    grid = steps.shape[1], triton.cdiv(hidden.shape[1], _STATE_BLOCK)
    _keep_states[grid](
        steps,
        steps.stride(0),
        known,
        positions,
        hidden,
        hidden.stride(0),
        states,
        states.stride(0),
        hidden.shape[1],
        BLOCK=_STATE_BLOCK,
    )


@triton.jit
def _find_shifts(p_step, stride_step, p_known, p_position, p_shift):
    i_row = tl.program_id(0)
    row = tl.load(p_step + i_row)
    if row >= 0:
        start, planned = first_position(p_step, stride_step, p_known, p_position, i_row, row)
        tl.store(p_shift + row, start - planned)


@triton.jit
def _shift_words(
    p_shift,
    p_row,
    p_position,
    num_tokens,
    p_seq_len,
    num_decodes,
    p_draw,
    stride_draw,
    num_draws,
    BLOCK: tl.constexpr,
):
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_row = tl.load(p_row + o_i, mask=o_i < num_tokens, other=-1)
    is_live = b_row >= 0
    b_shift = tl.load(p_shift + b_row, mask=is_live, other=0)
    tl.store(
        p_position + o_i, tl.load(p_position + o_i, mask=is_live, other=0) + b_shift, mask=is_live
    )
    b_len = tl.load(p_seq_len + o_i, mask=is_live & (o_i < num_decodes), other=0)
    tl.store(p_seq_len + o_i, b_len + b_shift, mask=b_len > 0)
    b_row = tl.load(p_draw + o_i, mask=o_i < num_draws, other=-1)
    is_live = b_row >= 0
    b_shift = tl.load(p_shift + b_row, mask=is_live, other=0)
    for i_column in tl.static_range(1, 3):
        p_own = p_draw + i_column * stride_draw + o_i
        tl.store(p_own, tl.load(p_own, mask=is_live, other=0) + b_shift, mask=is_live)


@triton.jit
def _store_drafts(
    p_row,
    p_position,
    p_token,
    p_table,
    stride_table,
    vocab_size,
    p_seq_len,
    p_output,
    p_left,
    num_rows,
    BEHIND: tl.constexpr,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < num_rows
    b_row = tl.load(p_row + o_i, mask=inside, other=-1)
    is_live = b_row >= 0
    b_position = tl.load(p_position + o_i, mask=is_live, other=0)
    b_token = tl.load(p_token + o_i, mask=is_live, other=0)
    b_token = tl.minimum(tl.maximum(b_token, 0), vocab_size - 1)
    tl.store(
        p_table + b_row.to(tl.int64) * stride_table + b_position + BEHIND, b_token, mask=is_live
    )
    if ADVANCE >= 0:
        b_left = tl.load(p_left + o_i, mask=is_live, other=0) - 1
        goes_on = is_live & (b_left > 0)
        tl.store(p_left + o_i, b_left, mask=is_live)
        tl.store(p_row + o_i, tl.where(goes_on, b_row, -1), mask=inside)
        tl.store(p_position + o_i, b_position + ADVANCE, mask=goes_on)
        tl.store(p_seq_len + o_i, tl.where(goes_on, b_position + ADVANCE + 1, 0), mask=inside)
        tl.store(p_output + o_i, tl.load(p_output + o_i, mask=goes_on, other=0) + 1, mask=goes_on)


@triton.jit
def _keep_states(
    p_step,
    stride_step,
    p_known,
    p_position,
    p_hidden,
    stride_hidden,
    p_state,
    stride_state,
    size,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    row = tl.load(p_step + i_row)
    if (row >= 0) & (tl.load(p_step + 4 * stride_step + i_row) >= 0):
        first = tl.load(p_step + stride_step + i_row)
        at = first + tl.load(p_known + row) - 2 - tl.load(p_position + first)
        o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = o_i < size
        b_state = tl.load(p_hidden + at.to(tl.int64) * stride_hidden + o_i, mask=inside)
        tl.store(p_state + row.to(tl.int64) * stride_state + o_i, b_state, mask=inside)
