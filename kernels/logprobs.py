"""Log probabilities of chosen tokens and of the likeliest ones, without sorting the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_tops: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_top_ids: torch.Tensor,
    out_top_logprobs: torch.Tensor,
) -> None:
    """Writes the log probability of token_ids int32 [R] under logits bf16 or float32 [R, V] as float32 [R].

    For row r, out_top_ids int32 and out_top_logprobs float32 [R, N] get the num_tops[r] likeliest tokens, num_tops
    int32 [R] at most N: likeliest first, smaller ids first among equals. Nothing is written for a row whose num_tops is
    negative. One pass over a row for the sum and one for each of the likeliest.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == out_top_ids.stride(1) == out_top_logprobs.stride(1) == 1
    _logprobs[(num_rows,)](
        logits,
        token_ids,
        num_tops,
        out_logprobs,
        out_top_ids,
        out_top_logprobs,
        logits.stride(0),
        out_logprobs.stride(0),
        out_top_ids.stride(0),
        out_top_logprobs.stride(0),
        vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of the chosen tokens, and ids and log probabilities of each row's num_top likeliest."""
    num_rows, device = len(token_ids), logits.device
    num_tops = torch.full((num_rows,), num_top, dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(num_rows, num_top, device=device)
    logprobs(logits, token_ids, num_tops, chosen, top_ids, top_logprobs)
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
    do_not_specialize=["stride_out", "stride_top_id", "stride_top_logprob"],
    do_not_specialize_on_alignment=["p_out", "p_top_id", "p_top_logprob"],
)
def _logprobs(
    p_logit,
    p_token,
    p_num_top,
    p_out,
    p_top_id,
    p_top_logprob,
    stride_logit,
    stride_out,
    stride_top_id,
    stride_top_logprob,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logit + i_row * stride_logit
    num_top = tl.load(p_num_top + i_row)
    if num_top < 0:
        return
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i_v in range(0, vocab_size, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < vocab_size, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_x)
        # Lanes that saw only minus infinity keep a sum of zero.
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_x - b_shift)
        b_max = b_new
    highest = tl.max(b_max, axis=0)
    log_sum = highest + tl.log(tl.sum(b_sum * tl.exp(b_max - highest), axis=0))
    chosen = tl.load(p_row + tl.load(p_token + i_row)).to(tl.float32)
    tl.store(p_out + i_row * stride_out, chosen - log_sum)

    last = float("inf")
    last_id = -1
    for i_top in range(0, num_top):
        b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
        b_id = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for i_v in range(0, vocab_size, BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_v, mask=o_v < vocab_size, other=float("-inf")).to(tl.float32)
            is_next = (b_x < last) | ((b_x == last) & (o_v > last_id))
            is_better = is_next & (o_v < vocab_size) & ((b_x > b_best) | (b_id == 0x7FFFFFFF))
            b_best = tl.where(is_better, b_x, b_best)
            b_id = tl.where(is_better, o_v, b_id)
        last = tl.max(b_best, axis=0)
        last_id = tl.min(tl.where(b_best == last, b_id, 0x7FFFFFFF), axis=0)
        tl.store(p_top_id + i_row * stride_top_id + i_top, last_id)
        tl.store(p_top_logprob + i_row * stride_top_logprob + i_top, last - log_sum)
