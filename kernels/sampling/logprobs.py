"""Log probabilities of chosen tokens and of the likeliest ones, without sorting the vocabulary.

Of a row that ranks divide each says the highest logit, what its tokens weigh, and the likeliest of
them; the sum of what tokens weigh is one that no order changes (`weight_sums`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..peer.peer_memory import fetched, slot, written
from ..peer.peer_numbers import (
    highest_of_ranks,
    keep_epoch,
    last_epoch,
    meet_peers,
    number_of,
    put_number,
)
from .vocabulary_slice import SliceArguments, VocabularySlice
from .weight_sums import weight_of, whole_weights

BLOCK = 8192
MOST_TOPS = tl.constexpr(32)
"""Largest number of likeliest tokens that a row may ask for."""
SENT_BYTES = 8 + 32 * 8
"""Bytes of a slot that a row takes: a weight, and logits and tokens of the likeliest."""


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_tops: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_top_ids: torch.Tensor,
    out_top_logprobs: torch.Tensor,
    part: VocabularySlice | None = None,
) -> None:
    """Writes the log probability of token_ids int32 [R] under logits bf16 or float32 [R, V] as
    float32 [R].

    For row r, out_top_ids int32 and out_top_logprobs float32 [R, N] get the num_tops[r] likeliest
    tokens, num_tops int32 [R] at most N: likeliest first, smaller ids first among equals. Nothing
    is written for a row whose num_tops is negative. Two passes over a row for the sum and one for
    each of the likeliest.

    `part`: which tokens the logits are of; all ranks launch with the same rows, N at most
    `MOST_TOPS`, and write the same, with the bits of one process.
    """
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == out_top_ids.stride(1) == out_top_logprobs.stride(1) == 1
    assert part is None or (
        out_top_ids.shape[1] <= MOST_TOPS.value and part.memory.slot_bytes >= SENT_BYTES
    )
    of_slice = SliceArguments(part, logits)
    _logprobs[of_slice.grid(num_rows)](
        logits,
        token_ids,
        num_tops,
        out_logprobs,
        out_top_ids,
        out_top_logprobs,
        *of_slice.memory,
        logits.stride(0),
        out_logprobs.stride(0),
        out_top_ids.stride(0),
        out_top_logprobs.stride(0),
        num_rows,
        num_tokens,
        *of_slice.place,
        BLOCK=min(BLOCK, triton.next_power_of_2(num_tokens)),
        PADDED_SIZE=triton.next_power_of_2(of_slice.num_ranks),
        **of_slice.constants,
        num_warps=16,
    )


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, part: VocabularySlice | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of the chosen tokens, and ids and log probabilities of each row's num_top
    likeliest; see `logprobs`."""
    num_rows = len(token_ids)
    device = logits.device
    num_tops = torch.full((num_rows,), num_top, dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(num_rows, num_top, device=device)
    logprobs(logits, token_ids, num_tops, chosen, top_ids, top_logprobs, part)
    return chosen, top_ids, top_logprobs


def logprobs_twin(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities in plain torch, in float32 or better."""
    all_logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)
    ranked = all_logprobs.sort(dim=1, descending=True, stable=True)
    chosen = all_logprobs.gather(1, token_ids.long()[:, None])[:, 0]
    return chosen, ranked.indices[:, :num_top].int(), ranked.values[:, :num_top]


# One kernel serves any number of them, at any address.
@triton.jit(
    do_not_specialize=[
        "stride_out",
        "stride_top_id",
        "stride_top_logprob",
        "num_rows",
        "index",
        "first_token",
    ],
    do_not_specialize_on_alignment=["p_out", "p_top_id", "p_top_logprob"],
)
def _logprobs(
    p_logit,
    p_token,
    p_num_top,
    p_out,
    p_top_id,
    p_top_logprob,
    p_bases,
    p_number,
    stride_logit,
    stride_out,
    stride_top_id,
    stride_top_logprob,
    num_rows,
    num_tokens,
    first_token,
    index,
    slot_bytes,
    max_polls,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_block = tl.program_id(0)
    peers = (p_bases, index, i_block, slot_bytes, max_polls, HOST)
    epoch = last_epoch(p_number, i_block, SIZE)
    i_row = i_block.to(tl.int64)
    while i_row < num_rows:
        num_top = tl.load(p_num_top + i_row)
        if num_top >= 0:
            p_row = p_logit + i_row * stride_logit
            p_id = p_top_id + i_row * stride_top_id
            p_value = p_top_logprob + i_row * stride_top_logprob
            own = _highest(p_row, num_tokens, BLOCK)
            epoch += 1
            place = tl.load(p_token + i_row) - first_token
            is_own = (place >= 0) & (place < num_tokens)
            chosen = tl.load(p_row + place, mask=is_own, other=float("-inf")).to(tl.float32)
            highest, chosen = highest_of_ranks(own, chosen, peers, epoch, SIZE, ON_GPU)
            total = _weight(p_row, num_tokens, highest, BLOCK)
            if SIZE == 1:
                log_sum = highest + tl.log(weight_of(total))
                _tops(
                    p_row,
                    first_token,
                    num_tokens,
                    num_top,
                    p_id,
                    p_value,
                    log_sum,
                    peers,
                    epoch,
                    BLOCK,
                    SIZE,
                )
            else:
                epoch += 1
                put_number(total, 0, peers, epoch, tl.int64, SIZE)
                _tops(
                    p_row,
                    first_token,
                    num_tokens,
                    num_top,
                    p_id,
                    p_value,
                    0.0,
                    peers,
                    epoch,
                    BLOCK,
                    SIZE,
                )
                meet_peers(peers, epoch, SIZE, ON_GPU)
                total = number_of(0, 0, peers, epoch, tl.int64, SIZE)
                for rank in tl.static_range(1, SIZE):
                    total += number_of(rank, 0, peers, epoch, tl.int64, SIZE)
                log_sum = highest + tl.log(weight_of(total))
                _tops_of_ranks(num_top, p_id, p_value, log_sum, peers, epoch, SIZE, PADDED_SIZE)
            tl.store(p_out + i_row * stride_out, chosen - log_sum)
        i_row += tl.num_programs(0)
    keep_epoch(p_number, i_block, epoch, SIZE)


@triton.jit
def _highest(p_row, num_tokens, BLOCK: tl.constexpr):
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i_v in range(0, num_tokens, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < num_tokens, other=float("-inf")).to(tl.float32)
        b_max = tl.maximum(b_max, b_x)
    return tl.max(b_max, axis=0)


@triton.jit
def _weight(p_row, num_tokens, highest, BLOCK: tl.constexpr):
    """The whole weights of a row's tokens."""
    b_sum = tl.zeros((BLOCK,), tl.int64)
    for i_v in range(0, num_tokens, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < num_tokens, other=float("-inf")).to(tl.float32)
        b_sum += whole_weights(tl.exp(b_x - highest))
    return tl.sum(b_sum, axis=0)


@triton.jit
def _is_behind(b_x, b_id, last, last_id):
    """Whether tokens are less likely than the last one, or as likely and have larger ids."""
    return (b_x < last) | ((b_x == last) & (b_id > last_id))


@triton.jit
def _tops(
    p_row,
    first_token,
    num_tokens,
    num_top,
    p_id,
    p_value,
    log_sum,
    peers,
    epoch,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Stores the likeliest tokens of a row with their log probabilities; or, of several ranks,
    sends this one's likeliest with their logits."""
    last = float("inf")
    last_id = -1
    for i_top in range(0, num_top):
        b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
        b_id = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for i_v in range(0, num_tokens, BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_v, mask=o_v < num_tokens, other=float("-inf")).to(tl.float32)
            is_next = _is_behind(b_x, first_token + o_v, last, last_id) & (o_v < num_tokens)
            is_better = is_next & ((b_x > b_best) | (b_id == 0x7FFFFFFF))
            b_best = tl.where(is_better, b_x, b_best)
            b_id = tl.where(is_better, first_token + o_v, b_id)
        last = tl.max(b_best, axis=0)
        last_id = tl.min(tl.where(b_best == last, b_id, 0x7FFFFFFF), axis=0)
        if SIZE == 1:
            tl.store(p_id + i_top, last_id)
            tl.store(p_value + i_top, last - log_sum)
        else:
            p_bases, index, i_block, slot_bytes, _, HOST = peers
            for rank in tl.static_range(SIZE):
                p_logit = (
                    slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.float32, SIZE) + 2
                )
                p_sent = (
                    slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.int32, SIZE)
                    + 2
                    + MOST_TOPS
                )
                written(p_logit + i_top, last, True, HOST)
                written(p_sent + i_top, last_id, True, HOST)


@triton.jit
def _tops_of_ranks(
    num_top, p_id, p_value, log_sum, peers, epoch, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr
):
    """Stores the likeliest tokens of all that ranks have sent."""
    p_bases, index, i_block, slot_bytes, _, HOST = peers
    o_sent = tl.arange(0, PADDED_SIZE * MOST_TOPS)
    o_part = (o_sent // MOST_TOPS) * (slot_bytes // 4)
    o_at = o_sent % MOST_TOPS
    inside = (o_sent // MOST_TOPS < SIZE) & (o_at < num_top)
    p_logit = slot(p_bases, index, i_block, epoch, 0, slot_bytes, tl.float32, SIZE) + 2
    p_sent = slot(p_bases, index, i_block, epoch, 0, slot_bytes, tl.int32, SIZE) + 2 + MOST_TOPS
    b_x = tl.where(inside, fetched(p_logit + o_part + o_at, inside, HOST), float("-inf"))
    b_id = tl.where(inside, fetched(p_sent + o_part + o_at, inside, HOST), 0x7FFFFFFF)
    last = float("inf")
    last_id = -1
    for i_top in range(0, num_top):
        is_next = _is_behind(b_x, b_id, last, last_id)
        last = tl.max(tl.where(is_next, b_x, float("-inf")), axis=0)
        last_id = tl.min(tl.where(is_next & (b_x == last), b_id, 0x7FFFFFFF), axis=0)
        tl.store(p_id + i_top, last_id)
        tl.store(p_value + i_top, last - log_sum)
