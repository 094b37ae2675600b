"""Drafters propose what followed the same tokens before, and nothing that they ought not to know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.drafting.drafter import Drafter
from headwater.engine_core.drafting.ngram import NGramDrafter
from headwater.engine_core.executor import Int32Array

NUM_ROWS, LENGTH, MAX_DRAFTS = 4, 64, 6
ONE, OTHER = b"1" * 16, b"2" * 16


class Table:
    """Rows of known tokens, as the scheduler has them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        # What no request has written is 99.
        self.token_ids: Int32Array = np.full((NUM_ROWS, LENGTH), 99, np.int32)
        self.num_known = [0] * NUM_ROWS

    def seat(self, row: int, prompt: Sequence[int], answer: Sequence[int] = (), namespace: bytes = ONE) -> None:
        self.drafter.seat(row, namespace, len(prompt))
        self.num_known[row] = 0
        self.add(row, [*prompt, *answer])

    def add(self, row: int, tokens: Sequence[int]) -> None:
        known = self.num_known[row]
        self.token_ids[row, known : known + len(tokens)] = tokens
        self.num_known[row] += len(tokens)

    def vacate(self, row: int) -> None:
        self.drafter.vacate(row, self.token_ids[row, : self.num_known[row]])
        self.num_known[row] = 0

    def propose(self, *rows: int, most: int = MAX_DRAFTS) -> list[list[int]]:
        columns = (np.array(c, np.int32) for c in (rows, [self.num_known[row] for row in rows], [most] * len(rows)))
        numbers, num_known, limits = columns
        proposal = self.drafter.propose(numbers, self.token_ids, num_known, limits)
        assert all(array.dtype == np.int32 for array in proposal)
        assert proposal.draft_ids.shape[0] == len(rows)
        assert ((proposal.match_lens > 0) == (proposal.num_drafts > 0)).all()
        return [ids[:n].tolist() for ids, n in zip(proposal.draft_ids, proposal.num_drafts, strict=True)]

    def run(self, row: int, prompt: Sequence[int], answer: Sequence[int], namespace: bytes = ONE) -> None:
        """A request from its first to its last token."""
        self.seat(row, prompt, answer, namespace)
        self.vacate(row)


def ngram() -> Table:
    return Table(NGramDrafter(NUM_ROWS, LENGTH, MAX_DRAFTS))


def test_look_up_copies_from_the_prompt_and_from_the_answer() -> None:
    table = ngram()
    table.seat(2, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert table.propose(2) == [[3, 4, 5, 6, 7, 8]]
    table.add(2, [30, 31, 32, 30, 31])
    assert table.propose(2, most=2) == [[32, 30]]


def test_look_up_serves_many_rows_of_any_length_at_once() -> None:
    table = ngram()
    table.seat(0, [])
    table.seat(1, [1])
    table.seat(2, [1, 2])
    table.seat(3, [1, 2, 3, 1, 2])
    assert table.propose(3, 0, 2, 1) == [[3, 1, 2, 3, 1, 2], [], [], []]
    assert table.propose(3, most=0) == [[]]
    assert table.propose(3, most=100) == [[3, 1, 2, 3, 1, 2]]
    assert table.propose() == []


def test_a_request_drafts_nothing_of_the_one_that_had_its_row() -> None:
    table = ngram()
    table.run(0, [1, 2, 3, 4, 5, 1, 2], [3, 4])
    table.propose(0)
    for _ in range(2):
        table.seat(0, [1, 2, 3, 4, 5, 1, 2])
        assert table.propose(0) == [[3, 4, 5, 1, 2, 3]]
        # Seated again without having left, as after a preemption that is told late.
        table.seat(0, [8, 1, 2])
        assert table.propose(0) == [[]]
        table.add(0, [8])
        assert table.propose(0) == [[]]
        table.vacate(0)


def test_an_answer_that_was_preempted_is_looked_up_as_before() -> None:
    table = ngram()
    table.seat(0, [1, 2, 3], [4, 5, 6, 1, 2])
    before = table.propose(0)
    table.vacate(0)
    table.seat(3, [1, 2, 3], [4, 5, 6, 1, 2])
    assert table.propose(3) == before == [[3, 4, 5, 6, 1, 2]]


def test_look_up_counts_the_memory_that_requests_have_touched() -> None:
    table = ngram()
    empty = table.drafter.num_bytes
    table.seat(0, [1] * 40)
    table.propose(0)
    one = table.drafter.num_bytes
    assert one > empty + 4 * 40
    table.vacate(0)
    table.run(0, [1] * 20, [])
    assert table.drafter.num_bytes == one
    table.seat(1, [1] * 40)
    table.propose(1)
    assert table.drafter.num_bytes - one == one - empty


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(10, 13), max_size=LENGTH), st.integers(0, 9))
def test_look_up_drafts_known_tokens_and_no_more_than_it_may(tokens: list[int], most: int) -> None:
    table = ngram()
    table.seat(1, tokens)
    (draft,) = table.propose(1, most=most)
    assert len(draft) <= min(most, MAX_DRAFTS)
    assert set(draft) <= set(tokens)
