"""Draws a token under top-k, top-p and min-p in rounds over a row of logits, of which ranks may
have a slice each.

A round finds the best perturbed token above a bound, and how many logits lie above that token's and
what they weigh. Ranks exchange these few numbers, in each pass over their slices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..peer.peer_numbers import best_of_ranks, highest_of_ranks, sums_of_ranks
from .sample import best_token, perturb
from .weight_sums import whole_weights


@triton.jit
def load_logits(p_row, i_v, num_tokens, BLOCK: tl.constexpr):
    o_v = i_v + tl.arange(0, BLOCK)
    return tl.load(p_row + o_v, mask=o_v < num_tokens, other=float("-inf")).to(tl.float32)


@triton.jit
def lane_maxima(p_row, num_tokens, BLOCK: tl.constexpr):
    """The highest logit of each lane, that is, of the slice's tokens equal modulo BLOCK."""
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i_v in range(0, num_tokens, BLOCK):
        b_max = tl.maximum(b_max, load_logits(p_row, i_v, num_tokens, BLOCK))
    return b_max


@triton.jit
def least_kept(highest, min_p, temperature):
    """The least logit that min-p keeps."""
    return tl.where(
        min_p > 0.0, highest + tl.log(tl.maximum(min_p, 1e-37)) * temperature, float("-inf")
    )


@triton.jit
def cut_of_lanes(b_max, highest, top_k):
    """Bound above which at least top_k lanes have their maximum, and hardly more; -3e38 where there
    are too few."""
    low = -3.0e38
    high = highest
    step = 1.0
    # Lowers the bound until top_k lanes are above it, then bisects: all in registers.
    count = tl.sum((b_max > high - step).to(tl.int32), axis=0)
    while (count < top_k) & (step < 1.0e37):
        high = high - step
        step = step * 4.0
        count = tl.sum((b_max > high - step).to(tl.int32), axis=0)
    if step < 1.0e37:
        low = high - step
        middle = low + (high - low) * 0.5
        while (count > top_k) & (middle > low) & (middle < high):
            inner_count = tl.sum((b_max > middle).to(tl.int32), axis=0)
            if inner_count >= top_k:
                low = middle
                count = inner_count
            else:
                high = middle
            middle = low + (high - low) * 0.5
    return low


@triton.jit
def _above(row, pivot, peers, epoch, BLOCK: tl.constexpr, SIZE: tl.constexpr, ON_GPU: tl.constexpr):
    """Number of logits that are at least the least one kept and above `pivot`, and their whole
    weights."""
    p_row, num_tokens, least, highest, inverse_temperature = row
    b_count = tl.zeros((BLOCK,), tl.int32)
    b_mass = tl.zeros((BLOCK,), tl.int64)
    for i_v in range(0, num_tokens, BLOCK):
        b_logit = load_logits(p_row, i_v, num_tokens, BLOCK)
        is_above = (b_logit >= least) & (b_logit > pivot)
        b_count += is_above.to(tl.int32)
        b_mass += whole_weights(
            tl.where(is_above, tl.exp((b_logit - highest) * inverse_temperature), 0.0)
        )
    return sums_of_ranks(
        tl.sum(b_count, axis=0), tl.sum(b_mass, axis=0), peers, epoch, SIZE, ON_GPU
    )


@triton.jit
def _least_above(
    row, pivot, peers, epoch, BLOCK: tl.constexpr, SIZE: tl.constexpr, ON_GPU: tl.constexpr
):
    """The least logit above `pivot`."""
    p_row, num_tokens, _, _, _ = row
    b_least = tl.full((BLOCK,), float("inf"), tl.float32)
    for i_v in range(0, num_tokens, BLOCK):
        b_logit = load_logits(p_row, i_v, num_tokens, BLOCK)
        b_least = tl.minimum(b_least, tl.where(b_logit > pivot, b_logit, float("inf")))
    opposite = -tl.min(b_least, axis=0)
    found, _ = highest_of_ranks(opposite, opposite, peers, epoch, SIZE, ON_GPU)
    return -found


@triton.jit
def _best_above(
    row,
    first_token,
    pivot,
    keys,
    peers,
    epoch,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The best perturbed token among the logits that are at least the least one kept and above
    `pivot`; and its logit."""
    p_row, num_tokens, least, _, inverse_temperature = row
    key_0, key_1 = keys
    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_id = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for i_v in range(0, num_tokens, BLOCK):
        b_logit = load_logits(p_row, i_v, num_tokens, BLOCK)
        o_v = i_v + tl.arange(0, BLOCK)
        b_score = perturb(
            b_logit, first_token + o_v, inverse_temperature, key_0, key_1, False, ON_GPU
        )
        b_score = tl.where((b_logit >= least) & (b_logit > pivot), b_score, float("-inf"))
        is_better = b_score > b_best
        b_best = tl.where(is_better, b_score, b_best)
        b_id = tl.where(is_better, o_v, b_id)
    score, token = best_token(b_best, b_id)
    token = tl.minimum(token, num_tokens - 1)
    logit = tl.load(p_row + token).to(tl.float32)
    return best_of_ranks(score, first_token + token, logit, peers, epoch, SIZE, ON_GPU)


@triton.jit
def _cut_after(
    row, low, top_k, peers, epoch, BLOCK: tl.constexpr, SIZE: tl.constexpr, ON_GPU: tl.constexpr
):
    """Bound above which the top_k largest logits lie, ties included, and no others; the weight
    above it; and the number of the last meeting. At least top_k logits lie above `low`.

    The top_k largest lane maxima miss only logits that share a lane with a larger one, so few
    passes are left: halving while many too many are in, then dropping the least value by value.
    """
    _, _, least, highest, _ = row
    high = highest
    epoch += 1
    count, mass = _above(row, low, peers, epoch, BLOCK, SIZE, ON_GPU)
    middle = low + (high - low) * 0.5
    while (count > top_k + 4) & (middle > low) & (middle < high):
        epoch += 1
        inner_count, inner_mass = _above(row, middle, peers, epoch, BLOCK, SIZE, ON_GPU)
        if inner_count >= top_k:
            low = middle
            count = inner_count
            mass = inner_mass
        else:
            high = middle
        middle = low + (high - low) * 0.5
    searching = count > top_k
    while searching:
        bound = tl.maximum(low, least - tl.abs(least) * 1e-6)
        lowest = _least_above(row, bound, peers, epoch + 1, BLOCK, SIZE, ON_GPU)
        epoch += 2
        inner_count, inner_mass = _above(row, lowest, peers, epoch, BLOCK, SIZE, ON_GPU)
        searching = inner_count >= top_k
        if searching:
            low = lowest
            count = inner_count
            mass = inner_mass
            searching = count > top_k
    return low, mass, epoch


@triton.jit
def draw_in_rounds(
    p_row,
    first_token,
    num_tokens,
    vocab_size,
    draw,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The drawn token, and the number of the last meeting. `draw` is (filters, temperature, keys,
    peers, number of the meeting before), of which filters are (top_k, top_p, min_p)."""
    filters, temperature, keys, peers, epoch = draw
    top_k, top_p, min_p = filters
    b_max = lane_maxima(p_row, num_tokens, BLOCK)
    own = tl.max(b_max, axis=0)
    bound = -3.0e38
    if (top_k > 0) & (top_p < 1.0):
        bound = cut_of_lanes(b_max, own, top_k)
    epoch += 1
    # One rank alone has top_k logits above its bound, so that all have as many above the highest
    # bound.
    highest, bound = highest_of_ranks(own, bound, peers, epoch, SIZE, ON_GPU)
    row = (p_row, num_tokens, least_kept(highest, min_p, temperature), highest, 1.0 / temperature)
    pivot = float("-inf")
    wanted_mass = float("inf")
    most = tl.where(top_k > 0, top_k, vocab_size)
    if top_p < 1.0:
        if top_k > 0:
            pivot, mass, epoch = _cut_after(row, bound, top_k, peers, epoch, BLOCK, SIZE, ON_GPU)
            wanted_mass = top_p * mass.to(tl.float32)
        else:
            epoch += 1
            _, mass = _above(row, pivot, peers, epoch, BLOCK, SIZE, ON_GPU)
            wanted_mass = top_p * mass.to(tl.float32)
    token = -1
    searching = True
    while searching:
        token, drawn = _best_above(
            row, first_token, pivot, keys, peers, epoch + 1, BLOCK, SIZE, ON_GPU
        )
        epoch += 2
        count_above, mass_above = _above(row, drawn, peers, epoch, BLOCK, SIZE, ON_GPU)
        is_wanted = (count_above < most) & (mass_above.to(tl.float32) < wanted_mass)
        searching = (is_wanted == 0) & (count_above > 0)
        pivot = drawn
    return token, epoch
