"""Draws one token a row under top-k, top-p and min-p without sorting the vocabulary.

All three keep an upper set of the logits. The best perturbed token of a larger upper set, when it lies in the wanted
one, is also the best of that; when it does not, neither does any token with a logit as low, so the search goes on above
it. Each round is two passes over one row and throws out half of the unwanted probability on average. The result is the
argmax over the wanted set, exactly and with the noise of `sample`. Ties at a cut are all kept.

Of top-k with a small k, one pass is enough: each lane keeps its two highest logits, among which all of the k largest
are, unless three of them share a lane; a row of which they do is left to the rounds.

Order, as elsewhere: min-p on the whole distribution, top-k, then top-p on what these leave, renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gumbel import PURPOSE_SAMPLE, row_keys
from .sample import Draws, best_token, perturb, scores_twin

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


def filtered_sample(logits: torch.Tensor, draws: Draws, filters: Filters, out: torch.Tensor) -> None:
    """Draws from logits bf16 or float32 [R, V]; writes out int32 [R] for rows with a filter and leaves the others as
    they are."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
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
        logits.stride(0),
        vocab_size,
    )
    on_gpu, width = logits.is_cuda, triton.next_power_of_2(vocab_size)
    _sample_few[(num_rows,)](
        *arguments,
        BLOCK=min(LANES, width),
        MOST=MOST_IN_LANES,
        LEFT=LEFT,
        PURPOSE=PURPOSE_SAMPLE,
        ON_GPU=on_gpu,
        num_warps=NUM_WARPS,
    )
    _filtered_sample[(num_rows,)](
        *arguments,
        BLOCK=min(BLOCK, width),
        MOST=MOST_IN_LANES,
        LEFT=LEFT,
        PURPOSE=PURPOSE_SAMPLE,
        ON_GPU=on_gpu,
        num_warps=NUM_WARPS,
    )


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
def _lane_maxima(p_row, vocab_size, BLOCK: tl.constexpr):
    """The highest logit of each lane, that is, of the tokens equal modulo BLOCK."""
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i_v in range(0, vocab_size, BLOCK):
        b_max = tl.maximum(b_max, _load_logits(p_row, i_v, vocab_size, BLOCK))
    return b_max


@triton.jit
def _load_logits(p_row, i_v, vocab_size, BLOCK: tl.constexpr):
    o_v = i_v + tl.arange(0, BLOCK)
    return tl.load(p_row + o_v, mask=o_v < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _above(p_row, vocab_size, least, pivot, highest, inverse_temperature, BLOCK: tl.constexpr):
    """Number of logits that are at least `least` and above `pivot`, and their weight relative to the highest
    logit's."""
    b_count = tl.zeros((BLOCK,), tl.int32)
    b_mass = tl.zeros((BLOCK,), tl.float32)
    for i_v in range(0, vocab_size, BLOCK):
        b_logit = _load_logits(p_row, i_v, vocab_size, BLOCK)
        is_above = (b_logit >= least) & (b_logit > pivot)
        b_count += is_above.to(tl.int32)
        b_mass += tl.where(is_above, tl.exp((b_logit - highest) * inverse_temperature), 0.0)
    return tl.sum(b_count, axis=0), tl.sum(b_mass, axis=0)


@triton.jit
def _best_above(
    p_row,
    vocab_size,
    least,
    pivot,
    inverse_temperature,
    key_0,
    key_1,
    is_greedy,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The best perturbed token among the logits at least `least` and above `pivot`."""
    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_id = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for i_v in range(0, vocab_size, BLOCK):
        b_logit = _load_logits(p_row, i_v, vocab_size, BLOCK)
        o_v = i_v + tl.arange(0, BLOCK)
        b_score = perturb(b_logit, o_v, inverse_temperature, key_0, key_1, is_greedy, ON_GPU)
        b_score = tl.where((b_logit >= least) & (b_logit > pivot), b_score, float("-inf"))
        is_better = b_score > b_best
        b_best = tl.where(is_better, b_score, b_best)
        b_id = tl.where(is_better, o_v, b_id)
    _, token = best_token(b_best, b_id)
    return tl.minimum(token, vocab_size - 1)


@triton.jit
def _cut_of_lanes(b_max, highest, top_k):
    """Bound above which at least top_k lanes have their maximum, and hardly more; -3e38 where there are too few."""
    low = -3.0e38
    high = highest
    step = 1.0
    # Widen from the top to where top_k lanes are, then halve: all in registers.
    while (tl.sum((b_max > high - step).to(tl.int32), axis=0) < top_k) & (step < 1.0e37):
        high = high - step
        step = step * 4.0
    if step < 1.0e37:
        low = high - step
        middle = low + (high - low) * 0.5
        while (middle > low) & (middle < high):
            if tl.sum((b_max > middle).to(tl.int32), axis=0) >= top_k:
                low = middle
            else:
                high = middle
            middle = low + (high - low) * 0.5
    return low


@triton.jit
def _least_above(p_row, vocab_size, pivot, BLOCK: tl.constexpr):
    b_least = tl.full((BLOCK,), float("inf"), tl.float32)
    for i_v in range(0, vocab_size, BLOCK):
        b_logit = _load_logits(p_row, i_v, vocab_size, BLOCK)
        b_least = tl.minimum(b_least, tl.where(b_logit > pivot, b_logit, float("inf")))
    return tl.min(b_least, axis=0)


@triton.jit
def _cut_after(p_row, vocab_size, b_max, least, highest, inverse_temperature, top_k, BLOCK: tl.constexpr):
    """Bound above which the top_k largest logits lie, ties included, and no others; and the weight above it.

    The top_k largest lane maxima miss only logits that share a lane with a larger one, so few passes are left: halving
    while many too many are in, then dropping the least value by value.
    """
    low = _cut_of_lanes(b_max, highest, top_k)
    high = highest
    count, mass = _above(p_row, vocab_size, least, low, highest, inverse_temperature, BLOCK)
    middle = low + (high - low) * 0.5
    while (count > top_k + 4) & (middle > low) & (middle < high):
        inner_count, inner_mass = _above(p_row, vocab_size, least, middle, highest, inverse_temperature, BLOCK)
        if inner_count >= top_k:
            low = middle
            count, mass = inner_count, inner_mass
        else:
            high = middle
        middle = low + (high - low) * 0.5
    searching = count > top_k
    while searching:
        lowest = _least_above(p_row, vocab_size, tl.maximum(low, least - tl.abs(least) * 1e-6), BLOCK)
        inner_count, inner_mass = _above(p_row, vocab_size, least, lowest, highest, inverse_temperature, BLOCK)
        searching = inner_count >= top_k
        if searching:
            low = lowest
            count, mass = inner_count, inner_mass
            searching = count > top_k
    return low, mass


@triton.jit
def _lane_tops(p_row, vocab_size, BLOCK: tl.constexpr):
    """The three highest logits of each lane, and the ids of the first two."""
    b_first = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_second, b_third = b_first, b_first
    b_at_first = tl.zeros((BLOCK,), tl.int32)
    b_at_second = b_at_first
    for i_v in tl.range(0, vocab_size, BLOCK, loop_unroll_factor=2):
        b_logit = _load_logits(p_row, i_v, vocab_size, BLOCK)
        is_first, is_second = b_logit > b_first, b_logit > b_second
        b_third = tl.maximum(b_third, tl.minimum(b_second, b_logit))
        b_at_second = tl.where(is_first, b_at_first, tl.where(is_second, i_v, b_at_second))
        b_second = tl.where(is_first, b_first, tl.maximum(b_second, b_logit))
        b_at_first = tl.where(is_first, i_v, b_at_first)
        b_first = tl.maximum(b_first, b_logit)
    o_lane = tl.arange(0, BLOCK)
    return b_first, b_second, b_third, b_at_first + o_lane, b_at_second + o_lane


@triton.jit
def _counted(b_first, b_second, bound):
    return tl.sum((b_first > bound).to(tl.int32) + (b_second > bound).to(tl.int32), axis=0)


@triton.jit
def _weight(b_first, b_second, bound, highest, inverse_temperature):
    b_mass = tl.where(b_first > bound, tl.exp((b_first - highest) * inverse_temperature), 0.0)
    b_mass += tl.where(b_second > bound, tl.exp((b_second - highest) * inverse_temperature), 0.0)
    return tl.sum(b_mass, axis=0)


@triton.jit
def _best_in_lanes(lanes, low, highest, top_k, top_p, inverse_temperature, key_0, key_1, ON_GPU: tl.constexpr):
    """The drawn token under top-k and top-p. The lane tops hold all logits above `low` and at least top_k logits, if
    there are so many."""
    b_first, b_second, b_id_first, b_id_second = lanes
    count = _counted(b_first, b_second, low)
    searching = count > top_k
    while searching:
        b_kept = tl.minimum(
            tl.where(b_first > low, b_first, float("inf")), tl.where(b_second > low, b_second, float("inf"))
        )
        lowest = tl.min(b_kept, axis=0)
        inner_count = _counted(b_first, b_second, lowest)
        searching = inner_count >= top_k
        if searching:
            low = lowest
            searching = inner_count > top_k
    mass = _weight(b_first, b_second, low, highest, inverse_temperature)
    wanted_mass = tl.where(top_p < 1.0, top_p * mass, float("inf"))
    b_score_first = perturb(b_first, b_id_first, inverse_temperature, key_0, key_1, False, ON_GPU)
    b_score_second = perturb(b_second, b_id_second, inverse_temperature, key_0, key_1, False, ON_GPU)
    token = 0
    pivot = low
    searching = True
    while searching:
        b_one = tl.where(b_first > pivot, b_score_first, float("-inf"))
        b_two = tl.where(b_second > pivot, b_score_second, float("-inf"))
        best = tl.max(tl.maximum(b_one, b_two), axis=0)
        b_id = tl.minimum(
            tl.where(b_one == best, b_id_first, 0x7FFFFFFF), tl.where(b_two == best, b_id_second, 0x7FFFFFFF)
        )
        token = tl.min(b_id, axis=0)
        b_drawn = tl.maximum(
            tl.where(b_id_first == token, b_first, float("-inf")),
            tl.where(b_id_second == token, b_second, float("-inf")),
        )
        drawn = tl.max(b_drawn, axis=0)
        count_above = _counted(b_first, b_second, drawn)
        mass_above = _weight(b_first, b_second, drawn, highest, inverse_temperature)
        is_wanted = (count_above < top_k) & (mass_above < wanted_mass)
        searching = (is_wanted == 0) & (count_above > 0)
        pivot = drawn
    return token


@triton.jit
def _sample_few(
    p_logit,
    p_temperature,
    p_seed,
    p_choice,
    p_output,
    p_top_k,
    p_top_p,
    p_min_p,
    p_out,
    stride_logit,
    vocab_size,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    LEFT: tl.constexpr,
    PURPOSE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Draws for rows with a small top-k, in one pass."""
    i_row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row), tl.load(p_min_p + i_row)
    temperature = tl.load(p_temperature + i_row)
    if (top_k > 0) & (top_k <= MOST) & (top_k < vocab_size) & (temperature > 0.0):
        p_row = p_logit + i_row * stride_logit
        key_0, key_1 = row_keys(tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_output + i_row), PURPOSE)
        b_first, b_second, b_third, b_id_first, b_id_second = _lane_tops(p_row, vocab_size, BLOCK)
        highest = tl.max(b_first, axis=0)
        least = tl.where(min_p > 0.0, highest + tl.log(tl.maximum(min_p, 1e-37)) * temperature, float("-inf"))
        b_first = tl.where(b_first >= least, b_first, float("-inf"))
        b_second = tl.where(b_second >= least, b_second, float("-inf"))
        low = _cut_of_lanes(b_first, highest, top_k)
        token = LEFT
        if tl.max(tl.where(b_third >= least, b_third, float("-inf")), axis=0) <= low:
            lanes = (b_first, b_second, b_id_first, b_id_second)
            token = _best_in_lanes(lanes, low, highest, top_k, top_p, 1.0 / temperature, key_0, key_1, ON_GPU)
        tl.store(p_out + i_row, token)


@triton.jit
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
    stride_logit,
    vocab_size,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    LEFT: tl.constexpr,
    PURPOSE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Draws for all other rows with a filter, in several passes."""
    i_row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row), tl.load(p_min_p + i_row)
    temperature = tl.load(p_temperature + i_row)
    cuts = (top_k > 0) & (top_k < vocab_size)
    is_filtered = cuts | (top_p < 1.0) | (min_p > 0.0)
    if cuts & (top_k <= MOST):
        is_filtered = tl.load(p_out + i_row) == LEFT
    # The greedy token survives every filter, and `sample` has it already.
    if is_filtered & (temperature > 0.0):
        p_row = p_logit + i_row * stride_logit
        key_0, key_1 = row_keys(tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_output + i_row), PURPOSE)
        inverse_temperature = 1.0 / temperature
        b_max = _lane_maxima(p_row, vocab_size, BLOCK)
        highest = tl.max(b_max, axis=0)
        least = tl.where(min_p > 0.0, highest + tl.log(tl.maximum(min_p, 1e-37)) * temperature, float("-inf"))
        pivot = float("-inf")
        mass = 0.0
        most = tl.where(top_k > 0, top_k, vocab_size)
        if top_p < 1.0:
            if top_k > 0:
                pivot, mass = _cut_after(p_row, vocab_size, b_max, least, highest, inverse_temperature, top_k, BLOCK)
            else:
                _, mass = _above(p_row, vocab_size, least, pivot, highest, inverse_temperature, BLOCK)
        wanted_mass = tl.where(top_p < 1.0, top_p * mass, float("inf"))
        token = -1
        searching = True
        while searching:
            token = _best_above(
                p_row, vocab_size, least, pivot, inverse_temperature, key_0, key_1, False, BLOCK, ON_GPU
            )
            drawn = tl.load(p_row + token).to(tl.float32)
            count_above, mass_above = _above(p_row, vocab_size, least, drawn, highest, inverse_temperature, BLOCK)
            is_wanted = (count_above < most) & (mass_above < wanted_mass)
            searching = (is_wanted == 0) & (count_above > 0)
            pivot = drawn
        tl.store(p_out + i_row, token)
