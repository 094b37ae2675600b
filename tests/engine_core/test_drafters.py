"""Drafters propose what followed the same tokens before, and nothing that they ought not to
know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.drafting.history import LAST_POSITION, History
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.proposer import Proposer
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.executor import Int32Array

NUM_ROWS = 4
LENGTH = 64
MAX_DRAFTS = 6
ONE = b"1" * 16
OTHER = b"2" * 16


class Table:
    """Rows of known tokens, as the scheduler has them."""

    def __init__(self, drafter: Proposer) -> None:
        self.drafter = drafter
        # What no request has written is 99.
        self.token_ids: Int32Array = np.full((NUM_ROWS, LENGTH), 99, np.int32)
        self.num_known = [0] * NUM_ROWS

    def seat(
        self,
        row: int,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        namespace: bytes = ONE,
        tenant: str = "a",
    ) -> None:
        self.drafter.seat(row, namespace, tenant, len(prompt))
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
        columns = (
            np.array(c, np.int32)
            for c in (rows, [self.num_known[row] for row in rows], [most] * len(rows))
        )
        numbers, num_known, limits = columns
        proposal = self.drafter.propose(numbers, self.token_ids, num_known, limits)
        assert all(array.dtype == np.int32 for array in proposal)
        assert proposal.draft_ids.shape[0] == len(rows)
        assert ((proposal.match_lens > 0) == (proposal.num_drafts > 0)).all()
        return [
            ids[:n].tolist() for ids, n in zip(proposal.draft_ids, proposal.num_drafts, strict=True)
        ]

    def run(
        self,
        row: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        namespace: bytes = ONE,
        tenant: str = "a",
    ) -> None:
        """A request from its first to its last token."""
        self.seat(row, prompt, answer, namespace, tenant)
        self.vacate(row)


def ngram() -> Table:
    return Table(NGramProposer(NUM_ROWS, LENGTH, MAX_DRAFTS))


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
    assert one > empty + 2 * 4 * 40
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


def suffix(max_tokens: int = 1 << 12) -> Table:
    return Table(SuffixProposer(NUM_ROWS, MAX_DRAFTS, max_tokens))


def test_an_answer_is_drafted_to_others_of_its_namespace_once_it_has_ended() -> None:
    table = suffix()
    table.seat(0, [90, 91, 92], [1, 2, 3, 4, 5])
    table.seat(1, [80], [7, 2, 3])
    assert table.propose(1) == [[]]
    table.vacate(0)
    assert table.propose(1) == [[4, 5]]
    table.seat(3, [81], [3, 4])
    table.seat(2, [80], [90, 91])
    # Prompts are not learned.
    assert table.propose(2, 3, 1) == [[], [5], [4, 5]]


def test_an_answer_is_never_drafted_to_another_namespace() -> None:
    table = suffix()
    table.run(0, [50], [1, 2, 3, 4, 5, 6], ONE)
    table.seat(1, [50], [1, 2], OTHER)
    assert table.propose(1) == [[]]
    table.run(2, [50], [1, 2, 7, 8], OTHER)
    table.seat(2, [50], [1, 2], ONE)
    assert table.propose(1, 2) == [[7, 8], [3, 4, 5, 6]]
    # The row's last request had another namespace.
    table.vacate(2)
    table.seat(2, [50, 1, 2], [], b"3" * 16)
    assert table.propose(2) == [[]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=40)), max_size=30)
)
def test_histories_know_the_tokens_of_their_namespace_alone(
    requests: list[tuple[int, list[int]]],
) -> None:
    """Few tokens in all, so that histories grow, forget, are dropped and come anew; each namespace
    has its own ids."""
    table = suffix(max_tokens=128)
    for turn, (tenant, bits) in enumerate(requests):
        row = turn % NUM_ROWS
        table.seat(
            row, [], [10 * tenant + bit for bit in bits], bytes([tenant]) * 16, str(tenant % 2)
        )
        (draft,) = table.propose(row)
        assert {token // 10 for token in draft} <= {tenant}
        # A row that has the tokens of another namespace than its own.
        table.seat((row + 1) % NUM_ROWS, [], [10 * tenant + bit for bit in bits], bytes([9]) * 16)
        assert table.propose((row + 1) % NUM_ROWS) == [[]]
        table.vacate(row)


def test_a_resumed_answer_is_learned_from_the_end_of_its_prompt() -> None:
    table = suffix()
    table.seat(0, [50, 51], [1, 2, 3])
    table.vacate(0)
    table.seat(2, [50, 51], [1, 2, 3])
    table.add(2, [4, 5, 6])
    table.vacate(2)
    table.seat(1, [50], [2, 3])
    assert table.propose(1) == [[4, 5, 6]]
    table.seat(1, [50, 51], [])
    assert table.propose(1) == [[]]


def test_a_row_without_an_answer_teaches_nothing() -> None:
    table = suffix()
    empty = table.drafter.num_bytes
    table.drafter.vacate(3, np.zeros(0, np.int32))
    table.run(0, [], [])
    table.run(0, [1, 2, 3, 4], [])
    table.run(0, [1, 2, 3, 4], [1, 2])
    assert table.drafter.num_bytes == empty
    table.seat(0, [])
    table.seat(1, [1])
    table.seat(2, [1, 2])
    assert table.propose(0, 1, 2) == [[], [], []]
    assert table.propose(0, 1, 2, most=0) == [[], [], []]


def test_ten_thousand_namespaces_fit_the_bound_and_the_last_ones_are_kept() -> None:
    table = suffix(max_tokens=1 << 12)
    table.run(0, [], [1, 2, 3, 4], b"first")
    sizes = set()
    for tenant in range(10_000):
        table.run(0, [], [1, 2, 3, 4], b"%d" % tenant)
        sizes.add(table.drafter.num_bytes)
    # Tokens; for each key the positions before them and half as many buckets; 48 bytes for each
    # history to be found and 4 for each row.
    most = 4 * (4096 + 2 * (4096 + 4096 // 2)) + 16 * 48 + 4 * NUM_ROWS
    assert max(sizes) == most
    assert table.drafter.num_bytes == most
    for namespace, expected in (
        (b"first", []),
        (b"9983", []),
        (b"9984", [3, 4]),
        (b"9999", [3, 4]),
    ):
        table.seat(1, [], [1, 2], namespace)
        assert table.propose(1) == [expected]


def test_a_namespace_in_use_outlives_one_that_is_not() -> None:
    table = suffix(max_tokens=1 << 10)
    table.run(0, [], [1, 2, 3, 4], ONE)
    table.run(0, [], [1, 2, 5, 6], OTHER)
    for tenant in range(8):
        table.seat(3, [], [1, 2], ONE)
        assert table.propose(3) == [[3, 4]]
        table.run(0, [], [1, 2, 3, 4], b"%d" % tenant)
    table.seat(2, [], [1, 2], OTHER)
    assert table.propose(2, 3) == [[], [3, 4]]


def test_a_tenant_with_many_namespaces_drives_out_its_own_histories() -> None:
    table = suffix(max_tokens=1 << 12)
    for i in range(3):
        table.run(0, [], [1, 2, 3, 4], b"neighbour%d" % i, "neighbour")
    for i in range(1000):
        table.run(0, [], [1, 2, 3, 4], b"salt%d" % i, "flood")
    for i in range(3):
        table.seat(i, [], [1, 2], b"neighbour%d" % i, "neighbour")
    assert table.propose(0, 1, 2) == [[3, 4]] * 3
    for i, expected in ((986, []), (987, [3, 4])):
        table.seat(3, [], [1, 2], b"salt%d" % i, "flood")
        assert table.propose(3) == [expected]


def test_a_row_whose_history_was_dropped_drafts_from_the_one_that_comes_after() -> None:
    table = suffix(max_tokens=1 << 9)
    table.run(0, [], [1, 2, 3, 4], ONE)
    table.seat(1, [], [1, 2], ONE)
    table.run(0, [], [1, 2, 8, 8], b"a")
    table.run(0, [], [1, 2, 8, 8], b"b")
    assert table.propose(1) == [[]]
    table.run(0, [], [1, 2, 6, 7], ONE)
    assert table.propose(1) == [[6, 7]]


def test_a_history_forgets_its_oldest_tokens_and_leaves_half_to_others() -> None:
    table = suffix(max_tokens=64)
    table.run(0, [], [90, 91, 92, 93], OTHER)
    for start in range(0, 80, 4):
        table.run(0, [], list(range(start, start + 4)), ONE)
    table.seat(1, [], [90, 91], OTHER)
    table.seat(2, [], [0, 1], ONE)
    table.seat(3, [], [76, 77], ONE)
    assert table.propose(1, 2, 3) == [[92, 93], [], [78, 79]]
    kept = []
    for start in range(0, 80, 4):
        table.seat(2, [], [start, start + 1], ONE)
        kept += table.propose(2)
    # Thirty-two tokens: six answers of four with what separates them, and two tokens.
    assert kept == [[]] * 14 + [[start + 2, start + 3] for start in range(56, 80, 4)]


def test_the_end_of_an_answer_longer_than_a_history_is_kept() -> None:
    table = suffix(max_tokens=64)
    table.run(0, [], list(range(60)))
    table.seat(1, [], [20, 21])
    table.seat(2, [], [57, 58])
    table.seat(3, [], [29, 30, 31])
    assert table.propose(1, 2, 3) == [[], [59], [32, 33, 34, 35, 36, 37]]


def test_a_history_grows_with_what_it_has_learned() -> None:
    table = suffix(max_tokens=1 << 14)
    for answer in range(400):
        table.run(0, [], [7, 1000 + answer, 2000 + answer, 3000 + answer])
    for answer in (0, 50, 399):
        table.seat(1, [], [1000 + answer, 2000 + answer])
        assert table.propose(1) == [[3000 + answer]]


def test_a_history_whose_positions_run_out_starts_anew() -> None:
    history = History(64)
    history.learn(np.arange(10, dtype=np.int32))
    history.end = LAST_POSITION - 5
    history.learn(np.arange(20, 26, dtype=np.int32))
    assert history.end == 1 + 6 + 1
    assert history.fields[3:] == (64, 32, 8)
