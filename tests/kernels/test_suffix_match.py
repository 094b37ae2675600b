"""Drafts from machine code against their twins, which search without an index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.executor import Int32Array
from headwater.kernels.cpu.suffix_match import (
    DRAFTS_PER_MATCH,
    KEY_LENS,
    MAX_MATCH,
    NUM_CANDIDATES,
    SEPARATOR,
    draft_twin,
    history_draft_twin,
    history_drafter,
    indexer,
    row_drafter,
)

LENGTH = 400
NUM_BUCKETS = 64
MOST = 9
repetitive = st.integers(1, 4).flatmap(lambda high: st.lists(st.integers(0, high), max_size=LENGTH))
"""Few symbols, so that long repeats occur, and more than one of the same length."""


class RowIndex:
    """The arrays that belong to a table of rows."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = np.zeros((num_rows, LENGTH), np.int32)
        self.index = (
            np.zeros((num_rows, len(KEY_LENS), NUM_BUCKETS), np.int32),
            np.zeros((num_rows, len(KEY_LENS), LENGTH), np.int32),
            np.zeros(num_rows, np.int32),
        )

    def draft(
        self, rows: list[int], num_known: list[int], most: list[int]
    ) -> list[tuple[list[int], int]]:
        drafts = np.zeros((len(rows), MOST), np.int32)
        num_drafts, match_lens = np.zeros((2, len(rows)), np.int32)
        columns = (np.array(column, np.int32) for column in (rows, num_known, most))
        row_drafter()(self.tokens, *self.index, *columns, drafts, num_drafts, match_lens)
        return [
            (row[:count].tolist(), length)
            for row, count, length in zip(
                drafts, num_drafts.tolist(), match_lens.tolist(), strict=True
            )
        ]


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(repetitive, min_size=1, max_size=3),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_rows_draft_what_a_search_without_an_index_finds(
    texts: list[list[int]], steps: list[int]
) -> None:
    rows = RowIndex(len(texts))
    for row, text in enumerate(texts):
        rows.tokens[row, : len(text)] = text
    num_known = [0] * len(texts)
    for step in steps:
        num_known = [
            min(known + step, len(text)) for known, text in zip(num_known, texts, strict=True)
        ]
        seen = rows.draft(list(range(len(texts))), num_known, [step % (MOST + 1)] * len(texts))
        assert seen == [
            draft_twin(text[:known], step % (MOST + 1), NUM_BUCKETS)
            for text, known in zip(texts, num_known, strict=True)
        ]


def one_row(tokens: list[int], most: int = MOST) -> tuple[list[int], int]:
    rows = RowIndex(1)
    rows.tokens[0, : len(tokens)] = tokens
    return rows.draft([0], [len(tokens)], [most])[0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], ([], 0)),
        ([7], ([], 0)),
        ([7, 7], ([], 0)),
        ([7, 8, 9, 7], ([], 0)),
        ([7, 8, 9, 7, 8], ([9, 7, 8, 9, 7, 8, 9, 7, 8], 2)),
        ([7, 7, 7], ([7] * MOST, 2)),
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], ([4, 9, 2, 3, 5, 1, 2, 3, 4], 3)),
        ([2, 3, 4, 9, 2, 3, 5, 6, 2, 3], ([5, 6, 2, 3, 5, 6, 2, 3, 5], 2)),
    ],
    ids=[
        "nothing",
        "one",
        "two",
        "one repeated",
        "a period",
        "one token again and again",
        "longest",
        "most recent",
    ],
)
def test_a_row_drafts_what_followed_the_longest_match(
    tokens: list[int], expected: tuple[list[int], int]
) -> None:
    assert one_row(tokens) == expected


def test_a_match_is_counted_up_to_its_bound() -> None:
    tokens = list(range(2, 2 + MAX_MATCH + 5))
    assert one_row([*tokens, 1, *tokens]) == ([1, *tokens[: MOST - 1]], MAX_MATCH)


def test_places_that_are_too_many_positions_of_a_bucket_ago_are_not_looked_at() -> None:
    long_ago = [5, 1, 2, 3]
    recent = [6, 1, 2, 4]
    assert one_row([*long_ago, *recent * (NUM_CANDIDATES - 1), 5, 1, 2])[0][0] == 3
    assert one_row([*long_ago, *recent * NUM_CANDIDATES, 5, 1, 2])[0][0] == 4


def test_a_long_match_is_found_however_often_its_last_tokens_have_been_seen_since() -> None:
    long_ago = [11, 12, 13, 14, 1, 2, 3]
    recent = [6, 1, 2, 4]
    tokens = [*long_ago, *recent * NUM_CANDIDATES, 11, 12, 13, 14, 1, 2]
    assert one_row(tokens) == ([3, *recent, *recent], 6)


def test_known_tokens_lie_anywhere_in_the_table_and_others_do_not_count() -> None:
    rows = RowIndex(3)
    rows.tokens[:] = np.array([4, 5] * (LENGTH // 2))
    rows.tokens[2, :5] = [7, 8, 9, 7, 8]
    seen: list[tuple[list[int], int]] = rows.draft([2, 0], [5, 2], [1, 9])
    assert seen == [([9], 2), ([], 0)]


def test_a_whole_table_is_indexed_in_steps_as_at_once() -> None:
    rng = np.random.default_rng(0)
    text: Int32Array = rng.integers(0, 3, LENGTH).astype(np.int32)
    at_once = RowIndex(1)
    in_steps = RowIndex(1)
    at_once.tokens[0] = text
    in_steps.tokens[0] = text
    for known in range(LENGTH + 1):
        last = in_steps.draft([0], [known], [MOST])
    assert last == at_once.draft([0], [LENGTH], [MOST])
    assert last[0][1] > 2
    for one, other in zip(at_once.index, in_steps.index, strict=True):
        assert np.array_equal(one, other)


class Ring:
    """A history of `capacity` tokens, and all that it was ever told."""

    def __init__(self, capacity: int) -> None:
        self.tokens = np.full(capacity, SEPARATOR, np.int32)
        self.heads = np.zeros((len(KEY_LENS), NUM_BUCKETS), np.int32)
        self.previous = np.zeros((len(KEY_LENS), capacity), np.int32)
        self.reported = [SEPARATOR]

    def learn(self, answer: list[int]) -> None:
        start = len(self.reported)
        self.reported += [*answer[1 - len(self.tokens) :], SEPARATOR]
        for position in range(start, len(self.reported)):
            self.tokens[position % len(self.tokens)] = self.reported[position]
        indexer()(
            self.tokens, self.heads, self.previous, len(self.tokens) - 1, start, len(self.reported)
        )

    @property
    def kept(self) -> list[int]:
        return self.reported[-len(self.tokens) :]

    def draft(self, known: list[int], most: int) -> tuple[list[int], int]:
        addresses = [array.ctypes.data for array in (self.tokens, self.heads, self.previous)]
        fields = np.array(
            [[*addresses, len(self.tokens), NUM_BUCKETS, len(self.reported)]], np.int64
        )
        table = np.array([[0] * LENGTH, known + [0] * (LENGTH - len(known))], np.int32)
        drafts = np.zeros((1, MOST), np.int32)
        history_of_row = np.array([-1, 0], np.int32)
        row, num_known, limit, num_drafts, match_lens = np.array(
            [[1], [len(known)], [most], [0], [0]], np.int32
        )
        history_drafter()(
            table, fields, history_of_row, row, num_known, limit, drafts, num_drafts, match_lens
        )
        return drafts[0, : num_drafts[0]].tolist(), int(match_lens[0])


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(3, 9),
    answers=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), max_size=20),
    known=st.lists(st.integers(0, 2), max_size=40),
    most=st.integers(0, MOST),
)
def test_a_history_drafts_what_a_search_without_an_index_finds(
    size: int, answers: list[list[int]], known: list[int], most: int
) -> None:
    ring = Ring(1 << size)
    for answer in answers:
        ring.learn(answer)
        assert ring.draft(known, most) == history_draft_twin(known, ring.kept, most, NUM_BUCKETS)


def reported(*answers: list[int], capacity: int = 256) -> Ring:
    ring = Ring(capacity)
    for answer in answers:
        ring.learn(answer)
    return ring


def test_a_history_goes_on_with_what_follows_most_often() -> None:
    ring = reported([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 4, 8], [9, 2, 3, 7])
    assert ring.draft([1, 2, 3], MOST) == ([4, 8], 3)
    assert ring.draft([5, 2, 3], MOST) == ([4, 8], 2)
    assert ring.draft([9, 2, 3], 1) == ([7], 3)


def test_what_follows_too_seldom_is_not_drafted() -> None:
    followers = [[1, 2, token, 30, 40] for token in (5, 6, 7, 8, 9)]
    assert reported(*followers).draft([1, 2], MOST) == ([9, 30, 40], 2)
    assert reported(*followers, [1, 2, 10]).draft([1, 2], MOST) == ([], 0)


def test_an_end_counts_as_what_follows_and_is_not_drafted() -> None:
    ends = [[7, 1, 2]] * 4
    assert reported([1, 2, 3], *ends).draft([1, 2], MOST) == ([3], 2)
    assert reported([1, 2, 3], *ends, [1, 2]).draft([1, 2], MOST) == ([], 0)
    assert reported([1, 2], [3, 4]).draft([1, 2], MOST) == ([], 0)


def test_a_longer_match_drafts_more() -> None:
    ring = reported(list(range(1, 40)))
    for length in (2, 3, 4):
        known = [50, *range(10 - length, 10)]
        assert ring.draft(known, MOST) == (list(range(10, 10 + DRAFTS_PER_MATCH * length)), length)


def test_a_match_reads_over_the_end_of_the_ring_and_no_further_back_than_it_holds() -> None:
    ring = reported([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], capacity=16)
    assert (
        ring.kept
        == [SEPARATOR, 1, 2, 3, 4, 5, SEPARATOR, 6, 7, 8, 9, 10, SEPARATOR, 11, 12, 13, SEPARATOR][
            -16:
        ]
    )
    ring.learn([14, 15, 16])
    assert ring.draft([13, 14, 15], 1) == ([16], 2)
    assert ring.draft([3, 4, 5], MOST) == ([], 0)
    # Positions 16 … 20 lie at both ends of the ring.
    assert ring.draft([11, 12], MOST) == ([13], 2)
    assert ring.draft([1, 2, 3], MOST) == ([], 0)
