"""Draws a token under a small top-k, and under top-p and min-p, in one pass over a row of logits,
of which ranks may have a slice each.

Each lane keeps its two highest logits, among which all of the k largest are, unless three of them
share a lane. Ranks exchange the k largest of their slices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..peer.peer_memory import fetched, slot, written
from ..peer.peer_numbers import meet_peers, put_number
from .filter_rounds import cut_of_lanes, least_kept, load_logits
from .sample import perturb
from .weight_sums import whole_weights

MOST_SENT = tl.constexpr(512)
"""Logits of a row that a rank sends, at most: those of the largest top-k, and as many that equal
the last of them."""
SENT_BYTES = 8 + 512 * 8
"""Bytes of a slot that a row takes: how many logits there are, the logits, and their tokens."""


@triton.jit
def _lane_tops(p_row, first_token, num_tokens, BLOCK: tl.constexpr):
    """The three highest logits of each lane, and the ids of the first two."""
    b_first = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_second = b_first
    b_third = b_first
    b_at_first = tl.zeros((BLOCK,), tl.int32)
    b_at_second = b_at_first
    for i_v in tl.range(0, num_tokens, BLOCK, loop_unroll_factor=2):
        b_logit = load_logits(p_row, i_v, num_tokens, BLOCK)
        is_first = b_logit > b_first
        is_second = b_logit > b_second
        b_third = tl.maximum(b_third, tl.minimum(b_second, b_logit))
        b_at_second = tl.where(is_first, b_at_first, tl.where(is_second, i_v, b_at_second))
        b_second = tl.where(is_first, b_first, tl.maximum(b_second, b_logit))
        b_at_first = tl.where(is_first, i_v, b_at_first)
        b_first = tl.maximum(b_first, b_logit)
    o_lane = first_token + tl.arange(0, BLOCK)
    return b_first, b_second, b_third, b_at_first + o_lane, b_at_second + o_lane


@triton.jit
def _counted(b_first, b_second, bound):
    return tl.sum((b_first > bound).to(tl.int32) + (b_second > bound).to(tl.int32), axis=0)


@triton.jit
def _weight(b_first, b_second, bound, highest, inverse_temperature):
    """The whole weights of the logits above a bound."""
    b_one = tl.where(b_first > bound, tl.exp((b_first - highest) * inverse_temperature), 0.0)
    b_two = tl.where(b_second > bound, tl.exp((b_second - highest) * inverse_temperature), 0.0)
    return tl.sum(whole_weights(b_one) + whole_weights(b_two), axis=0)


@triton.jit
def _without_least(b_first, b_second, low, top_k):
    """The bound `low`, or a higher one that leaves the top_k largest logits, ties included, and no
    others."""
    count = _counted(b_first, b_second, low)
    searching = count > top_k
    while searching:
        b_kept = tl.minimum(
            tl.where(b_first > low, b_first, float("inf")),
            tl.where(b_second > low, b_second, float("inf")),
        )
        lowest = tl.min(b_kept, axis=0)
        inner_count = _counted(b_first, b_second, lowest)
        searching = inner_count >= top_k
        if searching:
            low = lowest
            searching = inner_count > top_k
    return low


@triton.jit
def _best_in_lanes(
    lanes, low, highest, top_k, top_p, inverse_temperature, keys, ON_GPU: tl.constexpr
):
    """The drawn token under top-k and top-p. The lane tops hold all logits above `low` and at least
    top_k logits, if there are so many."""
    b_first, b_second, b_id_first, b_id_second = lanes
    key_0, key_1 = keys
    low = _without_least(b_first, b_second, low, top_k)
    mass = _weight(b_first, b_second, low, highest, inverse_temperature)
    wanted_mass = tl.where(top_p < 1.0, top_p * mass.to(tl.float32), float("inf"))
    b_score_first = perturb(b_first, b_id_first, inverse_temperature, key_0, key_1, False, ON_GPU)
    b_score_second = perturb(
        b_second, b_id_second, inverse_temperature, key_0, key_1, False, ON_GPU
    )
    token = 0
    pivot = low
    searching = True
    while searching:
        b_one = tl.where(b_first > pivot, b_score_first, float("-inf"))
        b_two = tl.where(b_second > pivot, b_score_second, float("-inf"))
        best = tl.max(tl.maximum(b_one, b_two), axis=0)
        b_id = tl.minimum(
            tl.where(b_one == best, b_id_first, 0x7FFFFFFF),
            tl.where(b_two == best, b_id_second, 0x7FFFFFFF),
        )
        token = tl.min(b_id, axis=0)
        b_drawn = tl.maximum(
            tl.where(b_id_first == token, b_first, float("-inf")),
            tl.where(b_id_second == token, b_second, float("-inf")),
        )
        drawn = tl.max(b_drawn, axis=0)
        count_above = _counted(b_first, b_second, drawn)
        mass_above = _weight(b_first, b_second, drawn, highest, inverse_temperature)
        is_wanted = (count_above < top_k) & (mass_above.to(tl.float32) < wanted_mass)
        searching = (is_wanted == 0) & (count_above > 0)
        pivot = drawn
    return token


@triton.jit
def _send(lanes, low, is_complete, peers, epoch, SIZE: tl.constexpr):
    """Writes the logits above `low`, and their tokens, to this rank's slot on every rank: how many
    there are, −1 where some are missing, then logits, then tokens."""
    b_first, b_second, b_id_first, b_id_second = lanes
    p_bases, index, i_block, slot_bytes, _, HOST = peers
    count = _counted(b_first, b_second, low)
    is_sent = is_complete & (count <= MOST_SENT)
    low = tl.where(is_sent, low, float("inf"))
    is_first = b_first > low
    is_second = b_second > low
    o_first = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    o_second = tl.sum(is_first.to(tl.int32), axis=0) + tl.cumsum(is_second.to(tl.int32), axis=0) - 1
    put_number(tl.where(is_sent, count, -1), 0, peers, epoch, tl.int32, SIZE)
    for rank in tl.static_range(SIZE):
        p_logit = slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.float32, SIZE) + 2
        p_id = (
            slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.int32, SIZE) + 2 + MOST_SENT
        )
        written(p_logit + o_first, b_first, is_first, HOST)
        written(p_logit + o_second, b_second, is_second, HOST)
        written(p_id + o_first, b_id_first, is_first, HOST)
        written(p_id + o_second, b_id_second, is_second, HOST)


@triton.jit
def _sent(peers, epoch, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Logits and tokens [PADDED_SIZE * MOST_SENT] that all ranks have written, and whether none is
    missing."""
    p_bases, index, i_block, slot_bytes, _, HOST = peers
    o_sent = tl.arange(0, PADDED_SIZE * MOST_SENT)
    o_part = (o_sent // MOST_SENT) * (slot_bytes // 4)
    o_at = o_sent % MOST_SENT
    is_rank = o_sent // MOST_SENT < SIZE
    p_count = slot(p_bases, index, i_block, epoch, 0, slot_bytes, tl.int32, SIZE)
    p_logit = slot(p_bases, index, i_block, epoch, 0, slot_bytes, tl.float32, SIZE) + 2
    b_count = fetched(p_count + o_part, is_rank, HOST)
    inside = o_at < b_count
    b_logit = tl.where(inside, fetched(p_logit + o_part + o_at, inside, HOST), float("-inf"))
    b_id = fetched(p_count + 2 + MOST_SENT + o_part + o_at, inside, HOST)
    return b_logit, b_id, tl.min(b_count, axis=0) >= 0


@triton.jit
def draw_in_lanes(
    p_row,
    first_token,
    num_tokens,
    draw,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The drawn token, or LEFT where it takes rounds. Ranks meet once. `draw` is (filters,
    temperature, keys, peers, number of the meeting), of which filters are (top_k, top_p, min_p)."""
    filters, temperature, keys, peers, epoch = draw
    top_k, top_p, min_p = filters
    b_first, b_second, b_third, b_id_first, b_id_second = _lane_tops(
        p_row, first_token, num_tokens, BLOCK
    )
    highest = tl.max(b_first, axis=0)
    # The other ranks' logits may be higher, and min-p's bound with them: it waits for them.
    least = float("-inf")
    if SIZE == 1:
        least = least_kept(highest, min_p, temperature)
    b_first = tl.where(b_first >= least, b_first, float("-inf"))
    b_second = tl.where(b_second >= least, b_second, float("-inf"))
    low = cut_of_lanes(b_first, highest, top_k)
    is_complete = tl.max(tl.where(b_third >= least, b_third, float("-inf")), axis=0) <= low
    token = LEFT
    if SIZE == 1:
        if is_complete:
            lanes = (b_first, b_second, b_id_first, b_id_second)
            token = _best_in_lanes(
                lanes, low, highest, top_k, top_p, 1.0 / temperature, keys, ON_GPU
            )
    else:
        low = _without_least(b_first, b_second, low, top_k)
        _send((b_first, b_second, b_id_first, b_id_second), low, is_complete, peers, epoch, SIZE)
        meet_peers(peers, epoch, SIZE, ON_GPU)
        b_logit, b_id, is_complete = _sent(peers, epoch, SIZE, PADDED_SIZE)
        if is_complete:
            highest = tl.max(b_logit, axis=0)
            b_logit = tl.where(
                b_logit >= least_kept(highest, min_p, temperature), b_logit, float("-inf")
            )
            low = cut_of_lanes(b_logit, highest, top_k)
            lanes = (b_logit, tl.full(b_logit.shape, float("-inf"), tl.float32), b_id, b_id)
            token = _best_in_lanes(
                lanes, low, highest, top_k, top_p, 1.0 / temperature, keys, ON_GPU
            )
    return token
