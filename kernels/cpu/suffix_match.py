"""Finds the last tokens of a sequence earlier in the sequence, or in a history of other sequences.

A sequence is an array, or a ring: position p lies at p & mask, where mask is −1 for an array and
the length − 1 for a ring, whose length is a power of two. Its index is a pair of hash chains as in
LZ77, for keys of KEY_LENS tokens: `heads[i, bucket]` is the last position whose key, the tokens
that end there, has that bucket, and `previous[i, position & mask]` the one before it. No key ends
at position 0, so 0 stands for none. Indexing costs the same for every token, and matching looks at
no more than NUM_CANDIDATES positions of a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from numba import njit, types

from .compiler.machine_code import compile_function
from .compiler.scalars import int32_array_at

KEY_LENS = 2, 6
"""Numbers of tokens in the shorter and in the longer key. Where the longer key is found, the
longest matches are among its places, however often the last two tokens alone have been seen
since."""
MIN_MATCH = KEY_LENS[0]
"""Shortest match, in tokens. One token has been seen in most texts, and what followed it then
seldom follows it now. With three for two, answers that repeat an edited file take 6 % more steps
(60 edits of this repository, 15 drafts)."""
MAX_MATCH = 32
"""Longest match that is compared, in tokens: of places that agree in as many, the most recent is as
good as any."""
NUM_CANDIDATES = 16
"""Number of positions of a bucket that are compared, the most recent ones. More positions find next
to nothing more: those edits take 0.2 % fewer steps with 64."""
MIN_PROBABILITY = 0.2
"""Least probability of a drafted token: the share of the matching places that go on with the
drafted tokens up to it."""
DRAFTS_PER_MATCH = 2
"""Number of tokens that a match in a history drafts for each of its own tokens: longer matches go
on agreeing longer."""
SEPARATOR = -1
"""Token id behind every sequence of a history. No token matches it, and it is never drafted."""


@njit
def _bucket(tokens: Any, mask: int, position: int, key_len: int, num_buckets: int) -> int:
    """Bucket of the key that ends at a position, −1 where a separator is in the key; num_buckets is
    a power of two up to 2 ** 24."""
    mixed = 0
    for each in range(position - key_len + 1, position + 1):
        if tokens[each & mask] == SEPARATOR:
            return -1
        mixed = (mixed * 0x9E3779B1 + tokens[each & mask] * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed >> 8) & (num_buckets - 1)


def _index(tokens: Any, heads: Any, previous: Any, mask: int, start: int, stop: int) -> None:
    """Adds positions start … stop − 1 to the index."""
    for i in range(len(KEY_LENS)):
        for position in range(max(start, KEY_LENS[i] - 1), stop):
            bucket = _bucket(tokens, mask, position, KEY_LENS[i], heads.shape[1])
            if bucket >= 0:
                previous[i, position & mask] = heads[i, bucket]
                heads[i, bucket] = position


_compiled_index = njit(_index)


@njit
def _match_len(tokens: Any, mask: int, first: int, position: int, known: Any) -> int:
    """Number of tokens `first` … `position` that are the last of `known`, MAX_MATCH at most."""
    most = min(position - first + 1, len(known), MAX_MATCH)
    last = len(known) - 1
    length = 0
    while length < most and tokens[(position - length) & mask] == known[last - length]:
        length += 1
    return length


@njit
def _places_of_key(
    tokens: Any,
    mask: int,
    head: Any,
    previous: Any,
    first: int,
    known: Any,
    key_len: int,
    places: Any,
) -> Any:
    """Like `_places`, for matches of key_len tokens or more."""
    num_places = 0
    longest = key_len
    last = len(known) - 1
    position = head[_bucket(known, -1, last, key_len, len(head))]
    # An index of the known tokens themselves ends with their last key.
    if mask < 0:
        position = previous[position]
    for _ in range(NUM_CANDIDATES):
        if position == 0 or position < first:
            break
        length = _match_len(tokens, mask, first, position, known)
        if length > longest:
            num_places = 0
            longest = length
        if length == longest and num_places < len(places):
            places[num_places] = position
            num_places += 1
        if longest == MAX_MATCH and num_places == len(places):
            break
        position = previous[position & mask]
    return num_places, longest


@njit
def _places(
    tokens: Any, mask: int, heads: Any, previous: Any, first: int, known: Any, places: Any
) -> Any:
    """Writes the positions from `first` on that match the most of the last known tokens to
    `places`, the most recent first. Returns the number of places and of matching tokens."""
    for i in range(len(KEY_LENS) - 1, -1, -1):
        if len(known) >= KEY_LENS[i]:
            num_places, length = _places_of_key(
                tokens, mask, heads[i], previous[i], first, known, KEY_LENS[i], places
            )
            if num_places:
                return num_places, length
    return 0, 0


@njit
def _likeliest(next_tokens: Any) -> Any:
    """The most frequent token, the first one of several, and its count. A SEPARATOR does not
    count."""
    best = SEPARATOR
    best_count = 0
    for i in range(len(next_tokens)):
        # No other token occurs more often than the number of places that are left.
        if best_count >= len(next_tokens) - i:
            break
        if next_tokens[i] == SEPARATOR:
            continue
        count = 0
        for j in range(i, len(next_tokens)):
            count += next_tokens[j] == next_tokens[i]
        if count > best_count:
            best = next_tokens[i]
            best_count = count
    return best, best_count


@njit
def _follow(tokens: Any, places: Any, num_places: int, next_tokens: Any, draft: Any) -> int:
    """Writes to `draft` the most frequent continuation of the places, token after token, among the
    places that agree with the draft so far, while the product of its shares is MIN_PROBABILITY or
    more. Returns the number of tokens."""
    mask = len(tokens) - 1
    probability = 1.0
    for k in range(len(draft)):
        for i in range(num_places):
            next_tokens[i] = tokens[(places[i] + 1 + k) & mask]
        token, count = _likeliest(next_tokens[:num_places])
        probability *= count / num_places
        if probability < MIN_PROBABILITY:
            return k
        draft[k] = token
        kept = 0
        for i in range(num_places):
            if next_tokens[i] == token:
                places[kept] = places[i]
                kept += 1
        num_places = kept
    return len(draft)


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
    places = np.empty(1, np.int32)
    for i in range(len(rows)):
        row = rows[i]
        known = num_known[i]
        _compiled_index(tokens[row], heads[row], previous[row], -1, num_indexed[row], known)
        num_indexed[row] = max(num_indexed[row], known)
        limit = min(most[i], drafts.shape[1])
        if limit <= 0 or known <= MIN_MATCH:
            continue
        found, length = _places(
            tokens[row], -1, heads[row], previous[row], 0, tokens[row, :known], places
        )
        if not found:
            continue
        # A copy that reaches the end of the known tokens continues with the drafted ones.
        for k in range(limit):
            source = places[0] + 1 + k
            drafts[i, k] = tokens[row, source] if source < known else drafts[i, source - known]
        num_drafts[i] = limit
        match_lens[i] = length


@njit
def _fields(history: Any) -> Any:
    return history[0], history[1], history[2], history[3], history[4], history[5]


def _draft_from_histories(
    tokens: Any,
    histories: Any,
    history_of_row: Any,
    rows: Any,
    num_known: Any,
    most: Any,
    drafts: Any,
    num_drafts: Any,
    match_lens: Any,
) -> None:
    places = np.empty(NUM_CANDIDATES, np.int32)
    next_tokens = np.empty(NUM_CANDIDATES, np.int32)
    for i in range(len(rows)):
        limit = min(most[i], drafts.shape[1])
        history = history_of_row[rows[i]]
        if limit <= 0 or history < 0 or num_known[i] < MIN_MATCH:
            continue
        p_tokens, p_heads, p_previous, capacity, num_buckets, end = _fields(histories[history])
        learned = int32_array_at(p_tokens, (capacity,))
        heads = int32_array_at(p_heads, (len(KEY_LENS), num_buckets))
        previous = int32_array_at(p_previous, (len(KEY_LENS), capacity))
        known = tokens[rows[i], : num_known[i]]
        first = max(end - capacity, 0)
        num_places, length = _places(learned, capacity - 1, heads, previous, first, known, places)
        if num_places:
            limit = min(limit, DRAFTS_PER_MATCH * length)
            num_drafts[i] = _follow(learned, places, num_places, next_tokens, drafts[i, :limit])
            match_lens[i] = length if num_drafts[i] else 0


@cache
def row_drafter() -> Callable[..., None]:
    """The compiled function that drafts for rows of a table from their own tokens.

    Arguments are int32 and contiguous: tokens [T, length], of which a row's first num_known ones
    count; the index, heads [T, 2, buckets], previous [T, 2, length] and num_indexed [T], all zeros
    in the beginning and those of a row where it gets other tokens, but for previous; rows,
    num_known and most [R]; and the results, zeros before: drafts [R, K], num_drafts and match_lens
    [R].
    """
    index = types.int32[:, :, ::1]
    table = types.int32[:, ::1]
    column = types.int32[::1]
    return compile_function(
        _draft_rows,
        types.void(table, index, index, column, column, column, column, table, column, column),
    )


@cache
def history_drafter() -> Callable[..., None]:
    """The compiled function that drafts for rows of a table from histories, which are rings of
    tokens.

    Arguments are those of `row_drafter`: tokens; histories, int64 [H, 6], and history_of_row [T],
    −1 for none; rows, num_known, most; the results. A row of `histories` holds the addresses of its
    tokens, heads and previous, its capacity in tokens, its number of buckets, and the position
    after its last token, which is a separator.
    """
    table = types.int32[:, ::1]
    column = types.int32[::1]
    return compile_function(
        _draft_from_histories,
        types.void(
            table, types.int64[:, ::1], column, column, column, column, table, column, column
        ),
    )


@cache
def indexer() -> Callable[..., None]:
    """The compiled function that adds positions to the index of a sequence. Arguments: tokens,
    heads [2, buckets] and previous [2, length], int32 and contiguous; mask; the first position and
    the one after the last."""
    column = types.int32[::1]
    table = types.int32[:, ::1]
    return compile_function(
        _index, types.void(column, table, table, types.int64, types.int64, types.int64)
    )


def draft_twin(tokens: Sequence[int], most: int, num_buckets: int) -> tuple[list[int], int]:
    """The draft of `row_drafter` for one row of known tokens, and the length of the match, without
    an index."""
    places = places_twin(tokens, tokens[:-1], num_buckets)
    if not places or most <= 0:
        return [], 0
    longest = max(length for _, length in places)
    position = next(position for position, length in places if length == longest)
    written = list(tokens)
    for k in range(most):
        written.append(written[position + 1 + k])
    return written[len(tokens) :], longest


def history_draft_twin(
    tokens: Sequence[int], learned: Sequence[int], most: int, num_buckets: int
) -> tuple[list[int], int]:
    """The draft of `history_drafter` for one row of known tokens from the tokens that a history
    still holds, and the length of the match, without an index."""
    found = places_twin(tokens, learned, num_buckets)
    longest = max((length for _, length in found), default=0)
    places = [position for position, length in found if length == longest]
    draft: list[int] = []
    probability = 1.0
    while places and len(draft) < min(most, DRAFTS_PER_MATCH * longest):
        next_tokens = [learned[position + 1 + len(draft)] for position in places]
        counts = Counter(token for token in next_tokens if token != SEPARATOR)
        token, count = max(counts.items(), key=itemgetter(1), default=(SEPARATOR, 0))
        probability *= count / len(places)
        if probability < MIN_PROBABILITY:
            break
        places = [
            place for place, follows in zip(places, next_tokens, strict=True) if follows == token
        ]
        draft.append(token)
    return draft, longest if draft else 0


def places_twin(
    tokens: Sequence[int], searched: Sequence[int], num_buckets: int
) -> list[tuple[int, int]]:
    """Positions in `searched`, the most recent first, at which the last of `tokens` end, and the
    number of matching tokens. Only positions that an index looks at count."""
    for key_len in reversed(KEY_LENS):
        if len(tokens) < key_len:
            continue
        bucket = _bucket.py_func(tokens, -1, len(tokens) - 1, key_len, num_buckets)
        ends = range(len(searched) - 1, key_len - 2, -1)
        seen = [
            end
            for end in ends
            if _bucket.py_func(searched, -1, end, key_len, num_buckets) == bucket
        ]
        lengths = [
            (end, _match_len.py_func(searched, -1, 0, end, tokens)) for end in seen[:NUM_CANDIDATES]
        ]
        if found := [(end, length) for end, length in lengths if length >= key_len]:
            return found
    return []


MAKERS = (_draft_rows, row_drafter), (_draft_from_histories, history_drafter), (_index, indexer)
"""Functions that draft for rows, and what compiles each."""
