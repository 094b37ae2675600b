"""Drafts on a GPU: the tokens that followed a row's last tokens at their last occurrence, and how
many drafts stood.

A step is launched before it is known how far the one before it came, so rows go on from `known`,
which the device keeps: how many tokens of each row are known. Before a step computes, drafts are
looked up, and the words that its launches read are set to where each row really is. After it has
sampled, drafts are compared with what was sampled in their places. Drafts may also be there
already: then only the words are set.

`steps` int32 [5, R] says of each row of the step: its row of the tables, negative for padding; the
index of its first token among the step's; how many drafts it may have at most, 0…31; whether it
goes on from `known` or from the words; and the index of its first draw, negative if it draws none.
A row's tokens stand side by side, as do its draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MIN_MATCH = 2
MAX_MATCH = 32
"""Least and largest number of last tokens that are compared."""
MOST_DRAFTS = 31
_WIDTH = MOST_DRAFTS + 1
_PLACE_BITS = 25
"""A match is encoded as one number: position in the low bits, number of matching tokens above
them."""
_SPLITS = 8
_BLOCK = 1024
"""Number of programs that search one row, and of positions that one program compares at once."""


class StepWords(NamedTuple):
    """Words that the launches of a step read, int32. Rows that draft or follow stand in front."""

    rows: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    """Number of keys that each decoding token reads, itself included."""
    end_lens: torch.Tensor | None
    """The same for tokens whose hidden states leave the last layer, where those are not all; the
    order is that of the rows in front."""
    draws: torch.Tensor
    """[4, …] table row, position, output index and hidden state of each draw."""


def match_scratch(num_rows: int, device: torch.device) -> torch.Tensor:
    """Workspace of `draft_rows` for up to `num_rows` rows."""
    return torch.zeros(num_rows, _SPLITS, dtype=torch.int32, device=device)


def draft_rows(
    steps: torch.Tensor,
    known: torch.Tensor,
    token_table: torch.Tensor,
    words: StepWords,
    scratch: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    are_there: bool = False,
) -> None:
    """Looks up drafts, of the longest match the most recent, and writes them to `token_table` int32
    [rows, …] behind the last known token; sets `known` int32 [rows] and the words. num_drafts int32
    [R]: how many were found, all that the row may have or none. Words of drafts that were not found
    become padding.

    `are_there`: the table holds as many drafts as the rows may have, so nothing is looked up.
    """
    num_rows = steps.shape[1]
    shared = (
        steps,
        steps.stride(0),
        known,
        words.positions,
        token_table,
        token_table.stride(0),
        scratch,
    )
    if not are_there:
        _find_matches[(num_rows, _SPLITS)](
            *shared,
            MIN=MIN_MATCH,
            MAX=MAX_MATCH,
            PLACE_BITS=_PLACE_BITS,
            SPLITS=_SPLITS,
            BLOCK=_BLOCK,
        )
    _write_drafts[(num_rows,)](
        *shared,
        words.rows,
        words.seq_lens,
        words.seq_lens if words.end_lens is None else words.end_lens,
        words.draws,
        words.draws.stride(0),
        num_drafts,
        HAS_ENDS=words.end_lens is not None,
        ARE_THERE=are_there,
        PLACE_BITS=_PLACE_BITS,
        SPLITS=_SPLITS,
        WIDTH=_WIDTH,
        num_warps=1,
    )


def store_drafted(
    steps: torch.Tensor,
    known: torch.Tensor,
    token_table: torch.Tensor,
    draws: torch.Tensor,
    num_drafts: torch.Tensor,
    token_ids: torch.Tensor,
    results: torch.Tensor,
    gains: torch.Tensor,
    first_results: torch.Tensor,
) -> None:
    """Writes the tokens that each row gains: its sampled tokens up to the first that differs from
    the draft in its place.

    token_ids int32 [draws]; `known` and `token_table` as in `draft_rows`, which came before.
    `results` and `gains` int32 lie in pinned memory of the host: from words first_results int32 [2]
    on, the sampled tokens by draw, and by row of the step the number of gained tokens plus 256
    times that of drafts.
    """
    _store_drafted[(steps.shape[1],)](
        steps,
        steps.stride(0),
        known,
        token_table,
        token_table.stride(0),
        draws,
        draws.stride(0),
        num_drafts,
        token_ids,
        results,
        gains,
        first_results,
        WIDTH=_WIDTH,
        num_warps=1,
    )


def draft_twin(known_ids: list[int], most: int) -> list[int]:
    """Tokens that are drafted after known tokens."""
    last = len(known_ids) - 1
    best = (0, 0)
    for place in range(last):
        length = 0
        while (
            length < min(MAX_MATCH, place + 1)
            and known_ids[place - length] == known_ids[last - length]
        ):
            length += 1
        best = max(best, (length, place))
    length, place = best
    if length < MIN_MATCH:
        return []
    return [known_ids[place + 1 + i % (last - place)] for i in range(most)]


@triton.jit
def first_position(p_step, stride_step, p_known, p_position, i_row, row):
    """Position of the row's last known token, and the position in the words."""
    planned = tl.load(p_position + tl.load(p_step + stride_step + i_row))
    follows = tl.load(p_step + 3 * stride_step + i_row) != 0
    return tl.where(follows, tl.load(p_known + row, mask=follows, other=1) - 1, planned), planned


@triton.jit
def _find_matches(
    p_step,
    stride_step,
    p_known,
    p_position,
    p_table,
    stride_table,
    p_best,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_split = tl.program_id(1)
    row = tl.load(p_step + i_row)
    best = 0
    if (row >= 0) & (tl.load(p_step + 2 * stride_step + i_row) > 0):
        start, _ = first_position(p_step, stride_step, p_known, p_position, i_row, row)
        p_token = p_table + row.to(tl.int64) * stride_table
        last = tl.load(p_token + start)
        for first in range(i_split * BLOCK, start, SPLITS * BLOCK):
            o_place = first + tl.arange(0, BLOCK)
            inside = o_place < start
            agrees = inside & (tl.load(p_token + o_place, mask=inside, other=0) == last)
            b_len = agrees.to(tl.int32)
            num_agreeing = tl.sum(b_len)
            n = 1
            while (num_agreeing > 0) & (n < MAX) & (n <= start):
                agrees = agrees & (o_place >= n)
                before = tl.load(p_token + start - n)
                agrees = agrees & (tl.load(p_token + o_place - n, mask=agrees, other=0) == before)
                b_len += agrees.to(tl.int32)
                num_agreeing = tl.sum(agrees.to(tl.int32))
                n += 1
            b_key = tl.where(b_len >= MIN, (b_len << PLACE_BITS) + o_place, 0)
            best = tl.maximum(best, tl.max(b_key))
    tl.store(p_best + i_row * SPLITS + i_split, best)


@triton.jit
def _write_drafts(
    p_step,
    stride_step,
    p_known,
    p_position,
    p_table,
    stride_table,
    p_best,
    p_row,
    p_seq_len,
    p_end_len,
    p_draw,
    stride_draw,
    p_num_drafts,
    HAS_ENDS: tl.constexpr,
    ARE_THERE: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i_row = tl.program_id(0)
    row = tl.load(p_step + i_row)
    most = tl.load(p_step + 2 * stride_step + i_row)
    num_drafts = 0
    if (row >= 0) & ((most > 0) | (tl.load(p_step + 3 * stride_step + i_row) != 0)):
        start, planned = first_position(p_step, stride_step, p_known, p_position, i_row, row)
        o_i = tl.arange(0, WIDTH)
        if ARE_THERE:
            num_drafts = most
        else:
            best = tl.max(tl.load(p_best + i_row * SPLITS + tl.arange(0, SPLITS)))
            is_found = (best > 0) & (most > 0)
            place = best & ((1 << PLACE_BITS) - 1)
            num_drafts = tl.where(is_found, most, 0)
            p_token = p_table + row.to(tl.int64) * stride_table
            # A copy that reaches the end of the known tokens continues with the drafted ones.
            source = place + 1 + o_i % tl.maximum(start - place, 1)
            drafted = o_i < num_drafts
            tl.store(
                p_token + start + 1 + o_i, tl.load(p_token + source, mask=drafted), mask=drafted
            )
        tl.store(p_known + row, start + 1)
        is_own = o_i <= most
        is_live = o_i <= num_drafts
        o_token = tl.load(p_step + stride_step + i_row) + o_i
        b_row = tl.where(is_live, row, -1)
        b_len = tl.where(is_live, start + 1 + o_i, 0)
        tl.store(p_row + o_token, b_row, mask=is_own)
        tl.store(p_position + o_token, tl.where(is_live, start + o_i, 0), mask=is_own)
        tl.store(p_seq_len + o_token, b_len, mask=is_own)
        if HAS_ENDS:
            tl.store(p_end_len + o_token, b_len, mask=is_own)
        first_draw = tl.load(p_step + 4 * stride_step + i_row)
        draws = is_own & (first_draw >= 0)
        p_own = p_draw + first_draw + o_i
        tl.store(p_own, b_row, mask=draws)
        tl.store(p_own + stride_draw, tl.where(is_live, start + o_i, 0), mask=draws)
        b_output = tl.load(p_own + 2 * stride_draw, mask=draws, other=0)
        tl.store(
            p_own + 2 * stride_draw, tl.where(is_live, b_output + start - planned, 0), mask=draws
        )
    tl.store(p_num_drafts + i_row, num_drafts)


@triton.jit
def _store_drafted(
    p_step,
    stride_step,
    p_known,
    p_table,
    stride_table,
    p_draw,
    stride_draw,
    p_num_drafts,
    p_token,
    p_result,
    p_gain,
    p_first,
    WIDTH: tl.constexpr,
):
    i_row = tl.program_id(0)
    row = tl.load(p_step + i_row)
    first_draw = tl.load(p_step + 4 * stride_step + i_row)
    if (row >= 0) & (first_draw >= 0):
        num_drafts = tl.load(p_num_drafts + i_row)
        position = tl.load(p_draw + stride_draw + first_draw)
        o_i = tl.arange(0, WIDTH)
        is_live = o_i <= num_drafts
        is_drafted = o_i < num_drafts
        p_next = p_table + row.to(tl.int64) * stride_table + position + 1 + o_i
        b_token = tl.load(p_token + first_draw + o_i, mask=is_live, other=0)
        b_draft = tl.load(p_next, mask=is_drafted, other=0)
        stands = is_drafted & (b_token == b_draft)
        num_gained = tl.min(tl.where(stands, WIDTH, o_i)) + 1
        tl.store(p_next, b_token, mask=o_i < num_gained)
        tl.store(p_known + row, position + 1 + num_gained)
        tl.store(p_result + tl.load(p_first) + first_draw + o_i, b_token, mask=is_live)
        tl.store(p_gain + tl.load(p_first + 1) + i_row, num_gained + 256 * num_drafts)
