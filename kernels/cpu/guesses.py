"""Bookkeeping of guessed tokens, and how many of them to verify: loops over a few numbers for every row and step, which
in arrays would take dozens of calls. Knows nothing about requests, drafters and how costs are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from .machine_code import compile_function

RIGHT, WRONG = 1, 2
"""States of a guess that has ended: all of it was sampled, or another token was."""
_ROWS, _COLUMN, _TABLE, _NUMBERS = types.int64[::1], types.int32[::1], types.int32[:, ::1], types.float64[::1]


@njit
def _promise(chances: Any, match_len: int, num_tokens: int) -> float:
    """Expected number of right tokens at the head of a draft of `num_tokens` tokens, each with the probability that
    belongs to the match."""
    chance, promise = chances[min(max(match_len, 1), len(chances)) - 1], 0.0
    for _ in range(num_tokens):
        promise = chance * (1.0 + promise)
    return promise


def _take_better(
    rows: Any,
    draft_ids: Any,
    num_drafts: Any,
    match_lens: Any,
    most: Any,
    vocab_size: int,
    chances: Any,
    guesses: Any,
    num_guesses: Any,
    guessed_after: Any,
    drafter: int,
    guessed_by: Any,
) -> None:
    for i in range(len(rows)):
        row, length = rows[i], min(num_drafts[i], most[i], draft_ids.shape[1], guesses.shape[1])
        num_legal = 0
        while num_legal < length and 0 <= draft_ids[i, num_legal] < vocab_size:
            num_legal += 1
        promised = _promise(chances, guessed_after[row], num_guesses[row])
        if num_legal > 0 and _promise(chances, match_lens[i], num_legal) > promised:
            for j in range(num_legal):
                guesses[row, j] = draft_ids[i, j]
            num_guesses[row], guessed_after[row], guessed_by[row] = num_legal, match_lens[i], drafter


def _compare(
    rows: Any,
    first: Any,
    num_known: Any,
    token_ids: Any,
    guesses: Any,
    num_guesses: Any,
    guessed_from: Any,
    num_right: Any,
    ends: Any,
) -> None:
    for i in range(len(rows)):
        row, ends[i] = rows[i], 0
        if num_guesses[row] == 0:
            continue
        for position in range(first[i], num_known[row]):
            at = position - guessed_from[row]
            if guesses[row, at] != token_ids[row, position]:
                ends[i] = WRONG
                break
            num_right[row] += 1
            if at + 1 == num_guesses[row]:
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
def _share_out(stands: Any, least: float, room: int, num_drafts: Any) -> None:
    """Adds to num_drafts [R] the drafts that are worth more than `least`, then those worth as much, first rows first,
    up to `room` in all."""
    for row in range(stands.shape[0]):
        for j in range(stands.shape[1]):
            if stands[row, j] > least:
                num_drafts[row] += 1
                room -= 1
    for row in range(stands.shape[0]):
        for j in range(stands.shape[1]):
            if stands[row, j] == least and room > 0:
                num_drafts[row] += 1
                room -= 1


def _choose_lengths(
    stands: Any, sizes: Any, seconds: Any, gap: float, num_rows: int, most_drafts: int, num_drafts: Any, gain: Any
) -> None:
    num_drafts[:] = 0
    gain[0] = 1.0
    values = np.sort(stands.copy().reshape(-1))
    num_values = len(values)
    num_useful = 0
    while num_useful < min(num_values, most_drafts) and values[num_values - 1 - num_useful] > 0.0:
        num_useful += 1
    if num_useful == 0:
        return
    plain = num_rows / _seconds_of(num_rows, sizes, seconds)
    best_total, gained, i_size = 0, float(num_rows), 0
    for total in range(1, num_useful + 1):
        gained += values[num_values - total]
        while i_size < len(sizes) and sizes[i_size] < num_rows + total:
            i_size += 1
        if total < num_useful and (i_size == len(sizes) or sizes[i_size] != num_rows + total):
            continue
        rate = gained / (_seconds_of(num_rows + total, sizes, seconds) + gap)
        if rate > gain[0] * plain:
            best_total, gain[0] = total, rate / plain
    if best_total == 0:
        return
    _share_out(stands, values[num_values - best_total], best_total, num_drafts)


@cache
def better_taker() -> Callable[..., None]:
    """The compiled function that takes proposals which promise more than the guess that is there, each cut before the
    first id that is no token.

    Arguments: rows int64 [R]; draft_ids int32 [R, any], num_drafts, match_lens and most int32 [R]; vocab_size; chances
    float64 [L], of a drafted token after a match of 1 … L tokens or more; and what it writes: guesses int32 [T, K],
    num_guesses and guessed_after int32 [T], the last being lengths of matches; then the drafter's number, which it
    writes to guessed_by int32 [T].
    """
    proposal, guess = (_TABLE, _COLUMN, _COLUMN, _COLUMN), (_TABLE, _COLUMN, _COLUMN)
    signature = types.void(_ROWS, *proposal, types.int64, _NUMBERS, *guess, types.int64, _COLUMN)
    return compile_function(_take_better, signature)


@cache
def comparer() -> Callable[..., None]:
    """The compiled function that compares guesses with tokens that have become known.

    Arguments: rows int64 [R]; first int32 [R], from which position on tokens are new, up to num_known int32 [T];
    token_ids int32 [T, length]; guesses int32 [T, K], num_guesses and guessed_from int32 [T], the last being the
    position of the first guess; and what it writes: num_right int32 [T], guesses that were right so far, and ends int32
    [R], RIGHT or WRONG for a guess that is over, else 0.
    """
    signature = types.void(_ROWS, _COLUMN, _COLUMN, _TABLE, _TABLE, _COLUMN, _COLUMN, _COLUMN, _COLUMN)
    return compile_function(_compare, signature)


@cache
def length_chooser() -> Callable[..., None]:
    """The compiled function behind `draft_lengths.choose`.

    Arguments: stands float64 [R, K]; sizes int32 [S], seconds float64 [S] and gap, of `StepCosts`; num_rows;
    most_drafts; and what it writes: num_drafts int32 [R] and gain float64 [1].
    """
    signature = types.void(
        types.float64[:, ::1], _COLUMN, _NUMBERS, types.float64, types.int64, types.int64, _COLUMN, _NUMBERS
    )
    return compile_function(_choose_lengths, signature)


@cache
def standing() -> Callable[..., None]:
    """The compiled function that says how probable it is that drafts stand.

    Its arguments: found float64 [R], that a row has drafts at all; right float64 [R], that a drafted token is right
    where all before it are; num_offered int32 [R]; and what it writes: stands float64 [R, K], descending along a row, 0
    behind what is offered.
    """
    signature = types.void(_NUMBERS, _NUMBERS, _COLUMN, types.float64[:, ::1])
    return compile_function(_stand, signature)


def _stand(found: Any, right: Any, num_offered: Any, stands: Any) -> None:
    for row in range(stands.shape[0]):
        probability = found[row]
        for j in range(stands.shape[1]):
            probability *= right[row]
            stands[row, j] = probability if j < num_offered[row] else 0.0
