"""Draws one token a row under top-k, top-p and min-p without sorting the vocabulary.

All three keep an upper set of the logits. The best perturbed token of a larger upper set, when it
lies in the wanted one, is also the best of that; when it does not, neither does any token with a
logit as low, so the search goes on above it. Each round is two passes over one row and throws out
half of the unwanted probability on average. The result is the argmax over the wanted set, exactly
and with the noise of `sample`. Ties at a cut are all kept.

Of top-k with a small k, one pass is enough, but for rare rows, which are left to the rounds; see
`filter_lanes`.

Order, as elsewhere: min-p on the whole distribution, top-k, then top-p on what these leave,
renormalised.

Ranks that have the logits of some tokens each exchange a few numbers a pass, or the largest k
logits of each, and draw the token that one process draws: bounds and counts are exact, and masses
are sums that no order changes (`weight_sums`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..peer.peer_numbers import keep_epoch, last_epoch
from .filter_lanes import SENT_BYTES, draw_in_lanes
from .filter_rounds import draw_in_rounds
from .gumbel import PURPOSE_SAMPLE, row_keys
from .sample import Draws, scores_twin
from .vocabulary_slice import SliceArguments, VocabularySlice

BLOCK = 8192
NUM_WARPS = 16
LANES = 4096
MOST_IN_LANES = 256
"""Largest top-k for which three of the k largest logits hardly ever share a lane."""
LEFT = -1
"""Stands in the place of a token where three of the largest logits share a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of R rows, on the device."""

    top_ks: torch.Tensor
    """int32 [R]; 0: no top-k filter."""
    top_ps: torch.Tensor
    """float32 [R]; 1: no top-p filter."""
    min_ps: torch.Tensor
    """float32 [R]; 0: no min-p filter."""


def filtered_sample(
    logits: torch.Tensor,
    draws: Draws,
    filters: Filters,
    out: torch.Tensor,
    part: VocabularySlice | None = None,
) -> None:
    """Draws from logits bf16 or float32 [R, V]; writes out int32 [R] for rows with a filter and
    leaves the others as they are. `part`: which tokens the logits are of; all ranks launch with the
    same rows and write the same tokens."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    assert part is None or part.memory.slot_bytes >= SENT_BYTES
    of_slice = SliceArguments(part, logits)
    arguments = (
        logits,
        draws.temperatures,
        draws.seeds,
        draws.choice_indices,
        draws.output_indices,
        filters.top_ks,
        filters.top_ps,
        filters.min_ps,
        out,
        *of_slice.memory,
        logits.stride(0),
        num_rows,
        num_tokens,
        num_tokens if part is None else part.vocab_size,
        *of_slice.place,
    )
    grid = of_slice.grid(num_rows)
    width = triton.next_power_of_2(num_tokens)
    constants = {
        "MOST": MOST_IN_LANES,
        "LEFT": LEFT,
        "PURPOSE": PURPOSE_SAMPLE,
        "num_warps": NUM_WARPS,
    }
    constants |= of_slice.constants
    constants["PADDED_SIZE"] = triton.next_power_of_2(of_slice.num_ranks)
    _filtered_sample[grid](*arguments, BLOCK=min(LANES, width), IN_LANES=True, **constants)
    _filtered_sample[grid](*arguments, BLOCK=min(BLOCK, width), IN_LANES=False, **constants)


def filter_twin(logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    """Tokens that the filters keep, bool [R, V], found by sorting."""
    greedy = draws.temperatures == 0
    x = logits.double() / torch.where(greedy, 1.0, draws.temperatures)[:, None].double()
    kept = x >= x.amax(1, keepdim=True) + filters.min_ps.double().log()[:, None]
    order = x.masked_fill(~kept, float("-inf")).sort(dim=1, descending=True).values
    k = torch.where(filters.top_ks > 0, filters.top_ks, x.shape[1]).clamp(max=x.shape[1]).long()
    kept &= x >= order.gather(1, k[:, None] - 1)
    p = x.masked_fill(~kept, float("-inf")).softmax(1)
    ranked = p.sort(dim=1, descending=True)
    mass_above = (ranked.values.cumsum(1) - ranked.values) < filters.top_ps[:, None].double()
    least = ranked.values.masked_fill(~mass_above, 2.0).amin(1, keepdim=True)
    return kept & ((p >= least) | (filters.top_ps >= 1)[:, None])


def filtered_sample_twin(logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    kept = filter_twin(logits, draws, filters)
    return scores_twin(logits, draws).masked_fill(~kept, float("-inf")).argmax(1).to(torch.int32)


@triton.jit
def _row_of(
    i_row,
    p_temperature,
    p_seed,
    p_choice,
    p_output,
    p_top_k,
    p_top_p,
    p_min_p,
    PURPOSE: tl.constexpr,
):
    """A row's filters (top_k, top_p, min_p), temperature and keys."""
    keys = row_keys(
        tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_output + i_row), PURPOSE
    )
    filters = (tl.load(p_top_k + i_row), tl.load(p_top_p + i_row), tl.load(p_min_p + i_row))
    return filters, tl.load(p_temperature + i_row), keys


@triton.jit(do_not_specialize=["num_rows", "index", "first_token"])
def _filtered_sample(
    p_logit,
    p_temperature,
    p_seed,
    p_choice,
    p_output,
    p_top_k,
    p_top_p,
    p_min_p,
    p_out,
    p_bases,
    p_number,
    stride_logit,
    num_rows,
    num_tokens,
    vocab_size,
    first_token,
    index,
    slot_bytes,
    max_polls,
    BLOCK: tl.constexpr,
    IN_LANES: tl.constexpr,
    MOST: tl.constexpr,
    LEFT: tl.constexpr,
    PURPOSE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Draws for rows with a small top-k, in one pass, where IN_LANES, and then for all other rows
    with a filter, in several passes."""
    i_block = tl.program_id(0)
    peers = (p_bases, index, i_block, slot_bytes, max_polls, HOST)
    epoch = last_epoch(p_number, i_block, SIZE)
    i_row = i_block.to(tl.int64)
    while i_row < num_rows:
        filters, temperature, keys = _row_of(
            i_row, p_temperature, p_seed, p_choice, p_output, p_top_k, p_top_p, p_min_p, PURPOSE
        )
        top_k, top_p, min_p = filters
        # The greedy token survives every filter, and `sample` has it already.
        if IN_LANES:
            if (top_k > 0) & (top_k <= MOST) & (top_k < vocab_size) & (temperature > 0.0):
                epoch += 1
                p_row = p_logit + i_row * stride_logit
                draw = (filters, temperature, keys, peers, epoch)
                token = draw_in_lanes(
                    p_row, first_token, num_tokens, draw, BLOCK, LEFT, SIZE, PADDED_SIZE, ON_GPU
                )
                tl.store(p_out + i_row, token)
        else:
            cuts = (top_k > 0) & (top_k < vocab_size)
            is_filtered = cuts | (top_p < 1.0) | (min_p > 0.0)
            if cuts & (top_k <= MOST):
                is_filtered = tl.load(p_out + i_row) == LEFT
            if is_filtered & (temperature > 0.0):
                p_row = p_logit + i_row * stride_logit
                draw = (filters, temperature, keys, peers, epoch)
                token, epoch = draw_in_rounds(
                    p_row, first_token, num_tokens, vocab_size, draw, BLOCK, SIZE, ON_GPU
                )
                tl.store(p_out + i_row, token)
        i_row += tl.num_programs(0)
    keep_epoch(p_number, i_block, epoch, SIZE)
