"""Finds the last tokens of a sequence earlier in the sequence, or in a history of other sequences.

An index is a hash chain as in LZ77: `head[bucket]` is the last position whose key, the token there and those before it,
has that bucket, and `previous[position]` the one before it. Position 0 ends no key, so 0 stands for none. Indexing
costs the same for every token, and matching looks at no more than NUM_CANDIDATES positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from headwater.kernels.cpu.compiled import compile_function

Int32Array = npt.NDArray[np.int32]

MIN_MATCH = 2
"""Tokens of a key, the shortest match. One token alone says too little: it has been seen in most texts, and what
followed it then seldom follows it now. After a token that broke a match, a match of two is found one token later."""
MAX_MATCH = 32
"""Tokens that are compared at most: of places that agree in as many, the most recent is as good as any."""
NUM_CANDIDATES = 64
"""Positions of the same bucket that are looked at, the most recent ones."""


@njit
def _bucket(before: int, last: int, num_buckets: int) -> int:
    """The bucket of a key; num_buckets is a power of two up to 2 ** 16."""
    mixed = (before * 0x9E3779B1 + last * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed >> 16) & (num_buckets - 1)


@njit
def _index(tokens: Any, head: Any, previous: Any, start: int, stop: int) -> None:
    """Adds positions start … stop − 1 of `tokens`, whose length is a power of two or more than `stop`, to the index."""
    for position in range(max(start, MIN_MATCH - 1), stop):
        bucket = _bucket(tokens[position - 1], tokens[position], len(head))
        previous[position] = head[bucket]
        head[bucket] = position


@njit
def _match_len(tokens: Any, position: int, last: int) -> int:
    """Tokens up to `position` that are those up to the later position `last`, MAX_MATCH at most."""
    most, length = min(position + 1, MAX_MATCH), 0
    while length < most and tokens[position - length] == tokens[last - length]:
        length += 1
    return length


@njit
def _longest_match(tokens: Any, previous: Any, last: int) -> Any:
    """The position whose tokens up to it are the most of those up to `last`, and their number; the most recent one of
    several. The number is 0 where there are fewer than MIN_MATCH."""
    best, best_len, position = 0, MIN_MATCH - 1, previous[last]
    for _ in range(NUM_CANDIDATES):
        if position == 0 or best_len == MAX_MATCH:
            break
        length = _match_len(tokens, position, last)
        if length > best_len:
            best, best_len = position, length
        position = previous[position]
    return best, best_len if best else 0


def _draft_rows(
    tokens: Any,
    heads: Any,
    previous: Any,
    num_indexed: Any,
    rows: Any,
    num_known: Any,
    most: Any,
    drafts: Any,
    num_drafts: Any,
    match_lens: Any,
) -> None:
    for i in range(len(rows)):
        row, known = rows[i], num_known[i]
        _index(tokens[row], heads[row], previous[row], num_indexed[row], known)
        num_indexed[row] = max(num_indexed[row], known)
        limit = min(most[i], drafts.shape[1])
        if limit <= 0 or known <= MIN_MATCH:
            continue
        position, length = _longest_match(tokens[row], previous[row], known - 1)
        if length == 0:
            continue
        # A copy that reaches the end of what is known goes on with what it has written.
        for k in range(limit):
            source = position + 1 + k
            drafts[i, k] = tokens[row, source] if source < known else drafts[i, source - known]
        num_drafts[i], match_lens[i] = limit, length


@cache
def row_drafter() -> Callable[..., None]:
    """The compiled function that drafts for rows of a table from their own tokens.

    Its arguments are int32 and contiguous: tokens [T, length], of which a row's first num_known ones count; the index,
    heads [T, buckets], previous [T, length] and num_indexed [T], zeros in the beginning and where a row gets other
    tokens; rows, num_known and most [R]; and the results, zeros before: drafts [R, K], num_drafts and match_lens [R].
    """
    table, column = types.int32[:, ::1], types.int32[::1]
    return compile_function(
        _draft_rows,
        types.void(table, table, table, column, column, column, column, table, column, column),
    )


def draft_twin(tokens: Sequence[int], most: int, num_buckets: int) -> tuple[list[int], int]:
    """What `row_drafter` drafts for one row of known tokens, and the length of the match, without an index."""
    places = places_twin(tokens, tokens[:-1], num_buckets)
    if not places or most <= 0:
        return [], 0
    longest = max(length for _, length in places)
    position = next(position for position, length in places if length == longest)
    written = list(tokens)
    for k in range(most):
        written.append(written[position + 1 + k])
    return written[len(tokens) :], longest


def places_twin(tokens: Sequence[int], searched: Sequence[int], num_buckets: int) -> list[tuple[int, int]]:
    """Positions in `searched`, the most recent first, whose tokens up to there are the last of `tokens`, and how many
    of them are; of those positions alone that an index looks at."""
    if len(tokens) < MIN_MATCH:
        return []
    bucket = _bucket.py_func(*tokens[-MIN_MATCH:], num_buckets)
    ends = range(len(searched) - 1, MIN_MATCH - 2, -1)
    seen = [end for end in ends if _bucket.py_func(*searched[end - 1 : end + 1], num_buckets) == bucket]
    found = []
    for end in seen[:NUM_CANDIDATES]:
        most = min(end + 1, len(tokens), MAX_MATCH)
        length = next((n for n in range(most) if searched[end - n] != tokens[-1 - n]), most)
        if length >= MIN_MATCH:
            found.append((end, length))
    return found
