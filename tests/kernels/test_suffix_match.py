"""Drafts from machine code against their twins, which search without an index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.executor import Int32Array
from headwater.kernels.cpu.suffix_match import MAX_MATCH, NUM_CANDIDATES, draft_twin, row_drafter

LENGTH, NUM_BUCKETS, MOST = 400, 16, 9
repetitive = st.integers(1, 4).flatmap(lambda high: st.lists(st.integers(0, high), max_size=LENGTH))
"""Few symbols, so that long repeats occur, and more than one of the same length."""


class RowIndex:
    """The arrays that belong to a table of rows."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = np.zeros((num_rows, LENGTH), np.int32)
        self.index = (
            np.zeros((num_rows, NUM_BUCKETS), np.int32),
            np.zeros((num_rows, LENGTH), np.int32),
            np.zeros(num_rows, np.int32),
        )

    def draft(self, rows: list[int], num_known: list[int], most: list[int]) -> list[tuple[list[int], int]]:
        drafts = np.zeros((len(rows), MOST), np.int32)
        num_drafts, match_lens = np.zeros((2, len(rows)), np.int32)
        columns = (np.array(column, np.int32) for column in (rows, num_known, most))
        row_drafter()(self.tokens, *self.index, *columns, drafts, num_drafts, match_lens)
        return [
            (row[:count].tolist(), length)
            for row, count, length in zip(drafts, num_drafts.tolist(), match_lens.tolist(), strict=True)
        ]


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(repetitive, min_size=1, max_size=3), steps=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_rows_draft_what_a_search_without_an_index_finds(texts: list[list[int]], steps: list[int]) -> None:
    rows = RowIndex(len(texts))
    for row, text in enumerate(texts):
        rows.tokens[row, : len(text)] = text
    num_known = [0] * len(texts)
    for step in steps:
        num_known = [min(known + step, len(text)) for known, text in zip(num_known, texts, strict=True)]
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
    ids=["nothing", "one", "two", "one repeated", "a period", "one token again and again", "longest", "most recent"],
)
def test_a_row_drafts_what_followed_the_longest_match(tokens: list[int], expected: tuple[list[int], int]) -> None:
    assert one_row(tokens) == expected


def test_a_match_is_counted_up_to_its_bound() -> None:
    tokens = list(range(2, 2 + MAX_MATCH + 5))
    assert one_row([*tokens, 1, *tokens]) == ([1, *tokens[: MOST - 1]], MAX_MATCH)


def test_places_that_are_too_many_positions_of_a_bucket_ago_are_not_looked_at() -> None:
    long_ago, recent = [5, 1, 2, 3], [6, 1, 2, 4]
    assert one_row([*long_ago, *recent * (NUM_CANDIDATES - 1), 5, 1, 2])[0][0] == 3
    assert one_row([*long_ago, *recent * NUM_CANDIDATES, 5, 1, 2])[0][0] == 4


def test_known_tokens_lie_anywhere_in_the_table_and_others_do_not_count() -> None:
    rows = RowIndex(3)
    rows.tokens[:] = np.array([4, 5] * (LENGTH // 2))
    rows.tokens[2, :5] = [7, 8, 9, 7, 8]
    seen: list[tuple[list[int], int]] = rows.draft([2, 0], [5, 2], [1, 9])
    assert seen == [([9], 2), ([], 0)]


def test_a_whole_table_is_indexed_in_steps_as_at_once() -> None:
    rng = np.random.default_rng(0)
    text: Int32Array = rng.integers(0, 3, LENGTH).astype(np.int32)
    at_once, in_steps = RowIndex(1), RowIndex(1)
    at_once.tokens[0], in_steps.tokens[0] = text, text
    for known in range(LENGTH + 1):
        last = in_steps.draft([0], [known], [MOST])
    assert last == at_once.draft([0], [LENGTH], [MOST])
    assert last[0][1] > 2
    for one, other in zip(at_once.index, in_steps.index, strict=True):
        assert np.array_equal(one, other)
