"""Bookkeeping of drafted tokens, and how many of them to verify: loops over a few numbers for every
row and step, which in arrays would take dozens of calls. Knows nothing about requests, drafters and
how costs are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from .compiler.machine_code import compile_function

RIGHT = 1
WRONG = 2
"""States of a draft that has ended: all of it was sampled, or another token was."""
BUCKET_SHIFT = 47
NUM_BUCKETS = 1024
"""Number of low bits of a probability that its bucket ignores, so that a bucket spans 3 %, and
number of buckets; the last one has all probabilities below 2 ** -32."""
ONE = 1023 << (52 - BUCKET_SHIFT)
"""Leading bits of 1.0."""
_ROWS = types.int64[::1]
_COLUMN = types.int32[::1]
_TABLE = types.int32[:, ::1]
_NUMBERS = types.float64[::1]


@njit
def _promise(chances: Any, match_len: int, num_tokens: int) -> float:
    """Expected number of right tokens at the head of a draft of `num_tokens` tokens, each with the
    probability that belongs to the match."""
    chance = chances[min(max(match_len, 1), len(chances)) - 1]
    promise = 0.0
    for _ in range(num_tokens):
        promise = chance * (1.0 + promise)
    return promise


def _take_better(
    rows: Any,
    proposed_ids: Any,
    num_proposed: Any,
    match_lens: Any,
    most: Any,
    vocab_size: int,
    chances: Any,
    drafts: Any,
    num_drafts: Any,
    drafted_after: Any,
    drafter: int,
    drafted_by: Any,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        length = min(num_proposed[i], most[i], proposed_ids.shape[1], drafts.shape[1])
        num_legal = 0
        while num_legal < length and 0 <= proposed_ids[i, num_legal] < vocab_size:
            num_legal += 1
        promised = _promise(chances, drafted_after[row], num_drafts[row])
        if num_legal > 0 and _promise(chances, match_lens[i], num_legal) > promised:
            for j in range(num_legal):
                drafts[row, j] = proposed_ids[i, j]
            num_drafts[row] = num_legal
            drafted_after[row] = match_lens[i]
            drafted_by[row] = drafter


def _compare(
    rows: Any,
    first: Any,
    num_known: Any,
    token_ids: Any,
    drafts: Any,
    num_drafts: Any,
    drafted_from: Any,
    num_right: Any,
    ends: Any,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        ends[i] = 0
        if num_drafts[row] == 0:
            continue
        for position in range(first[i], num_known[row]):
            at = position - drafted_from[row]
            if drafts[row, at] != token_ids[row, position]:
                ends[i] = WRONG
                break
            num_right[row] += 1
            if at + 1 == num_drafts[row]:
                ends[i] = RIGHT
                break


@njit
def _seconds_of(num_positions: int, sizes: Any, seconds: Any) -> float:
    """Seconds of a step, as `StepCosts.of`."""
    last = len(sizes) - 1
    if num_positions >= sizes[last]:
        return float(seconds[last] * num_positions / sizes[last])
    if num_positions <= sizes[0]:
        return float(seconds[0])
    i = 0
    while sizes[i + 1] < num_positions:
        i += 1
    share = (num_positions - sizes[i]) / (sizes[i + 1] - sizes[i])
    return float(seconds[i] + share * (seconds[i + 1] - seconds[i]))


@njit
def _by_size(stands: Any, values: Any, ends: Any) -> int:
    """Writes the positive values of stands to `values`, in descending order of their buckets;
    ends[b] is the end of bucket b. Returns their number. A few passes over thousands of values,
    where sorting them would take most of a step's time on the host."""
    bits = stands.reshape(-1).view(np.int64)
    ends[:] = 0
    for i in range(len(bits)):
        if bits[i] > 0:
            ends[_bucket(bits[i])] += 1
    num_positive = 0
    for bucket in range(NUM_BUCKETS):
        # Until values are placed, ends[b] is where bucket b begins.
        ends[bucket], num_positive = num_positive, num_positive + ends[bucket]
    flat = stands.reshape(-1)
    for i in range(len(bits)):
        if bits[i] > 0:
            bucket = _bucket(bits[i])
            values[ends[bucket]] = flat[i]
            ends[bucket] += 1
    return num_positive


@njit
def _bucket(bits: int) -> int:
    """Number of the bucket of a probability by its bits: positive floats are ordered as their bits
    are."""
    return int(min(max(ONE - (bits >> BUCKET_SHIFT), 0), NUM_BUCKETS - 1))


@njit
def _share_out(stands: Any, least: float, room: int, num_drafts: Any) -> None:
    """Adds to num_drafts [R] the drafts that are worth more than `least`, then those worth as much,
    first rows first, up to `room` in all."""
    most = stands.shape[1]
    for row in range(stands.shape[0]):
        while num_drafts[row] < most and stands[row, num_drafts[row]] > least:
            num_drafts[row] += 1
            room -= 1
    for row in range(stands.shape[0]):
        while num_drafts[row] < most and stands[row, num_drafts[row]] == least and room > 0:
            num_drafts[row] += 1
            room -= 1


def _choose_lengths(
    stands: Any,
    sizes: Any,
    seconds: Any,
    gap: float,
    num_rows: int,
    most_drafts: int,
    num_drafts: Any,
    gain: Any,
) -> None:
    num_drafts[:] = 0
    gain[0] = 1.0
    values = np.empty(stands.size)
    ends = np.empty(NUM_BUCKETS, np.int64)
    num_useful = min(_by_size(stands, values, ends), most_drafts)
    if num_useful <= 0:
        return
    plain = num_rows / _seconds_of(num_rows, sizes, seconds)
    best_total = 0
    least = 1.0
    smallest = 1.0
    gained = float(num_rows)
    at = 0
    bucket = 0
    for i_size in range(len(sizes) + 1):
        total = num_useful if i_size == len(sizes) else min(sizes[i_size] - num_rows, num_useful)
        if total <= at:
            continue
        while at < total:
            if ends[bucket] > total:
                # The largest of this bucket come first, the others belong to larger totals.
                values[at : ends[bucket]] = np.sort(values[at : ends[bucket]])[::-1]
            end = min(ends[bucket], total)
            if end > at:
                smallest = 1.0
            for i in range(at, end):
                gained += values[i]
                smallest = min(smallest, values[i])
            at = end
            bucket += at == ends[bucket]
        rate = gained / (_seconds_of(num_rows + total, sizes, seconds) + gap)
        if rate > gain[0] * plain:
            best_total = total
            least = smallest
            gain[0] = rate / plain
    if best_total == 0:
        return
    _share_out(stands, least, best_total, num_drafts)


@cache
def better_taker() -> Callable[..., None]:
    """The compiled function that takes proposals which promise more than the draft that is there,
    each cut before the first id that is no token.

    Arguments: rows int64 [R]; proposed_ids int32 [R, any], num_proposed, match_lens and most int32
    [R]; vocab_size; chances float64 [L], of a drafted token after a match of 1 … L tokens or more;
    and what it writes: drafts int32 [T, K], num_drafts and drafted_after int32 [T], the last being
    lengths of matches; then the drafter's number, which it writes to drafted_by int32 [T]."""
    proposal = (_TABLE, _COLUMN, _COLUMN, _COLUMN)
    draft = (_TABLE, _COLUMN, _COLUMN)
    signature = types.void(_ROWS, *proposal, types.int64, _NUMBERS, *draft, types.int64, _COLUMN)
    return compile_function(_take_better, signature)


@cache
def comparer() -> Callable[..., None]:
    """The compiled function that compares drafts with tokens that have become known.

    Arguments: rows int64 [R]; first int32 [R], from which position on tokens are new, up to
    num_known int32 [T]; token_ids int32 [T, length]; drafts int32 [T, K], num_drafts and
    drafted_from int32 [T], the last being the position of the first draft; and what it writes:
    num_right int32 [T], drafts that were right so far, and ends int32 [R], RIGHT or WRONG for a
    draft that is over, else 0.
    """
    signature = types.void(
        _ROWS, _COLUMN, _COLUMN, _TABLE, _TABLE, _COLUMN, _COLUMN, _COLUMN, _COLUMN
    )
    return compile_function(_compare, signature)


@cache
def length_chooser() -> Callable[..., None]:
    """The compiled function behind `draft_lengths.choose`.

    Arguments: stands float64 [R, K]; sizes int32 [S], seconds float64 [S] and gap, of `StepCosts`;
    num_rows; most_drafts; and what it writes: num_drafts int32 [R] and gain float64 [1].
    """
    signature = types.void(
        types.float64[:, ::1],
        _COLUMN,
        _NUMBERS,
        types.float64,
        types.int64,
        types.int64,
        _COLUMN,
        _NUMBERS,
    )
    return compile_function(_choose_lengths, signature)


def _note_shares(
    rows: Any,
    most: Any,
    num_drafts: Any,
    num_accepted: Any,
    memory: float,
    shared_memory: float,
    shares: Any,
    shared: Any,
) -> None:
    num_asked = 0
    found = 0
    right = 0
    tried = 0
    for i in range(len(rows)):
        if most[i] == 0:
            continue
        row = rows[i]
        has_found = num_drafts[i] > 0
        # The first token after the accepted ones was rejected, unless all were accepted.
        num_tried = num_accepted[i] + (num_accepted[i] < num_drafts[i])
        shares[0, row] = memory * shares[0, row] + has_found
        shares[1, row] = memory * shares[1, row] + 1.0
        shares[2, row] = memory * shares[2, row] + num_accepted[i]
        shares[3, row] = memory * shares[3, row] + num_tried
        num_asked = num_asked + 1
        found = found + has_found
        right = right + num_accepted[i]
        tried = tried + num_tried
    kept = shared_memory**num_asked
    shared[0], shared[1] = kept * shared[0] + found, kept * shared[1] + num_asked
    shared[2], shared[3] = kept * shared[2] + right, kept * shared[3] + tried


def _fade_shares(
    rows: Any, fading: float, prior_weight: float, shares: Any, shared: Any, found: Any, right: Any
) -> None:
    priors = prior_weight * shared[0] / shared[1], prior_weight * shared[2] / shared[3]
    for i in range(len(rows)):
        row = rows[i]
        for j in range(4):
            shares[j, row] *= fading
        found[i] = (shares[0, row] + priors[0]) / (shares[1, row] + prior_weight)
        right[i] = (shares[2, row] + priors[1]) / (shares[3, row] + prior_weight)


@cache
def share_noter() -> Callable[..., None]:
    """The compiled function that notes what became of drafts of the executor, for `DeviceDrafts`.

    Arguments: rows int64 [R]; most, num_drafts and num_accepted int32 [R], where most is 0 no draft
    was asked for; the weights of what was known of a row, and of all rows for each of them; and
    what it writes: shares float64 [4, T] and shared float64 [4], drafts that were found and asked
    for, tokens that stand and that were compared.
    """
    table = types.float64[:, ::1]
    return compile_function(
        _note_shares,
        types.void(_ROWS, _COLUMN, _COLUMN, _COLUMN, types.float64, types.float64, table, _NUMBERS),
    )


@cache
def share_fader() -> Callable[..., None]:
    """The compiled function that says shares of found drafts and of tokens that stand, for
    `DeviceDrafts`.

    Arguments: rows int64 [R]; fading, by which shares of these rows are multiplied first; weight of
    all rows' shares for a row; shares and shared of `share_noter`; and what it writes: found and
    right float64 [R].
    """
    table = types.float64[:, ::1]
    return compile_function(
        _fade_shares,
        types.void(_ROWS, types.float64, types.float64, table, _NUMBERS, _NUMBERS, _NUMBERS),
    )


@cache
def standing() -> Callable[..., None]:
    """The compiled function that says how probable it is that drafts stand.

    Its arguments: found float64 [R], that a row has drafts at all; right float64 [R], that a
    drafted token is right where all before it are; num_offered int32 [R]; and what it writes:
    stands float64 [R, K], descending along a row, 0 behind what is offered.
    """
    signature = types.void(_NUMBERS, _NUMBERS, _COLUMN, types.float64[:, ::1])
    return compile_function(_stand, signature)


def _stand(found: Any, right: Any, num_offered: Any, stands: Any) -> None:
    for row in range(stands.shape[0]):
        probability = found[row]
        for j in range(stands.shape[1]):
            probability *= right[row]
            stands[row, j] = probability if j < num_offered[row] else 0.0


MAKERS = (
    (_take_better, better_taker),
    (_compare, comparer),
    (_choose_lengths, length_chooser),
    (_stand, standing),
)
"""Functions of each step that drafts, and what compiles each."""
