"""Lengths of drafts are the best of those that are compared, by costs as measured and acceptance as
seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.drafting.acceptance import FIRST_ESTIMATE, LONGEST_MATCH, Acceptance
from headwater.engine_core.drafting.draft_lengths import choose, expected
from headwater.engine_core.drafting.step_costs import StepCosts

MOST = 3
"""Drafts of a row."""
FLAT = StepCosts.measured([1, 2, 4, 8, 16], [1.0] * 5)
PROPORTIONAL = StepCosts.measured([1, 2, 4, 8, 16], [1.0, 2.0, 4.0, 8.0, 16.0])
ONE_ROW = np.zeros(1, np.int64)


def stands_of(
    acceptance: Sequence[float], num_offered: Sequence[int], most: int = MOST
) -> np.ndarray:
    return expected(np.array(acceptance), np.array(num_offered, np.int32), most)


@st.composite
def costs(draw: st.DrawFn) -> StepCosts:
    sizes = sorted(draw(st.sets(st.integers(2, 14), max_size=5)) | {1})
    seconds = [draw(st.floats(0.5, 4.0)) for _ in sizes]
    return StepCosts.measured(sizes, seconds, draw(st.sampled_from([0.0, 0.1, 1.0])))


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]), st.integers(0, MOST)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(ROWS, costs(), st.integers(0, 4), st.integers(0, 10))
@pytest.mark.long
def test_no_other_lengths_of_a_compared_total_bring_more_tokens_a_second(
    rows: list[tuple[float, int]], costs: StepCosts, num_others: int, most_drafts: int
) -> None:
    stands = stands_of(*zip(*rows, strict=True))
    num_rows = len(rows) + num_others

    def rate(lengths: Sequence[int]) -> float:
        gained = num_rows + sum(stands[row, :length].sum() for row, length in enumerate(lengths))
        return float(gained / (costs.of(num_rows + sum(lengths)) + costs.gap))

    chosen = choose(stands, costs, num_rows, most_drafts)
    lengths = chosen.num_drafts.tolist()
    useful = [int(np.count_nonzero(row)) for row in stands]
    assert all(0 <= length <= most for length, most in zip(lengths, useful, strict=True))
    assert sum(lengths) <= most_drafts
    most_useful = min(sum(useful), most_drafts)
    totals = {
        size - num_rows for size in costs.sizes.tolist() if 0 < size - num_rows < most_useful
    } | {most_useful}
    every = [
        each
        for each in itertools.product(*(range(n + 1) for n in useful))
        if sum(each) > 0 and sum(each) in totals
    ]
    # Without drafts no row waits for a result, so that there is no gap.
    plain = num_rows / float(costs.of(num_rows))
    best = max([plain, *map(rate, every)])
    if sum(lengths):
        assert rate(lengths) == pytest.approx(best)
        assert chosen.gain == pytest.approx(best / plain)
        assert chosen.gain > 1.0
    else:
        assert best == pytest.approx(plain)
        assert chosen.gain == 1.0


@pytest.mark.parametrize("acceptance", ["alike", "spread", "equal", "tiny"])
def test_the_likeliest_drafts_are_chosen_of_thousands(acceptance: str) -> None:
    """Sums over the likeliest drafts against a plain sort; many rows share a bucket, or a value."""
    rng = np.random.default_rng(0)
    num_rows = 256
    most = 15
    rows = {
        "alike": rng.uniform(0.60, 0.61, num_rows),
        "spread": rng.uniform(0.0, 1.0, num_rows),
        "equal": np.full(num_rows, 0.7),
        "tiny": rng.uniform(0.0, 1e-3, num_rows),
    }
    stands = stands_of(rows[acceptance].tolist(), [most] * num_rows, most)
    values = np.sort(stands.reshape(-1))[::-1]
    for total in (1, 7, 100, 256, 1000, 2500, stands.size):
        # Nothing costs more up to this many positions, and no number of drafts behind it pays.
        costs = StepCosts.measured(
            [num_rows, num_rows + total, num_rows + total + 1], [1.0, 1.0, 1e6]
        )
        chosen = choose(stands, costs, num_rows, stands.size)
        assert chosen.num_drafts.sum() == total
        gained = sum(stands[row, :count].sum() for row, count in enumerate(chosen.num_drafts))
        assert gained == pytest.approx(values[:total].sum())
        assert chosen.gain == pytest.approx((num_rows + values[:total].sum()) / num_rows)


def test_a_row_whose_drafts_are_accepted_gets_those_that_others_would_waste() -> None:
    costs = StepCosts.measured([1, 2, 4, 5, 16], [1.0, 1.0, 1.0, 1.0, 9.0])
    assert choose(stands_of([0.1, 0.9], [3, 3]), costs, 2, 100).num_drafts.tolist() == [0, 3]


def test_equally_valuable_drafts_of_the_first_rows_are_kept() -> None:
    assert choose(stands_of([1.0, 1.0, 1.0], [3, 3, 3]), FLAT, 3, 4).num_drafts.tolist() == [
        3,
        1,
        0,
    ]
    assert choose(stands_of([0.5, 1.0, 0.5], [3, 3, 3]), FLAT, 3, 4).num_drafts.tolist() == [
        1,
        3,
        0,
    ]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.99])
def test_nothing_is_drafted_where_each_position_costs_a_step(acceptance: float) -> None:
    chosen = choose(stands_of([acceptance], [3]), PROPORTIONAL, 1, 100)
    assert (chosen.num_drafts.tolist(), chosen.gain) == ([0], 1.0)


def test_a_gap_is_paid_before_a_draft_is_worth_anything() -> None:
    stands = stands_of([0.5], [3])
    # 1.875 tokens in the time of 1 + gap.
    cheap, dear = (StepCosts.measured([1, 4], [1.0, 1.0], gap) for gap in (0.8, 0.9))
    assert choose(stands, cheap, 1, 100).gain == pytest.approx(1.875 / 1.8)
    assert choose(stands, dear, 1, 100).num_drafts.tolist() == [0]


@pytest.mark.parametrize(("num_offered", "most_drafts"), [([0, 0], 9), ([3, 3], 0)])
def test_where_nothing_is_offered_or_fits_nothing_is_drafted(
    num_offered: list[int], most_drafts: int
) -> None:
    assert choose(stands_of([0.9, 0.9], num_offered), FLAT, 2, most_drafts).num_drafts.tolist() == [
        0,
        0,
    ]


def test_a_draft_is_accepted_if_all_before_it_are() -> None:
    np.testing.assert_allclose(stands_of([0.5, 1.0], [2, 3]), [[0.5, 0.25, 0.0], [1.0, 1.0, 1.0]])


def test_costs_lie_on_lines_between_sizes_and_grow_in_proportion_behind_the_last() -> None:
    costs = StepCosts.measured([1, 2, 4], [1.0, 3.0, 5.0])
    np.testing.assert_allclose(costs.of([1, 2, 3, 4, 6, 8]), [1.0, 3.0, 4.0, 5.0, 7.5, 10.0])
    assert float(costs.of(2)) == 3.0


def test_a_step_never_costs_more_than_a_larger_one_however_it_was_measured() -> None:
    costs = StepCosts.measured([1, 2, 4, 8], [2.0, 1.0, 3.0, 2.5], gap=-0.2)
    # What else a machine does makes a measured time longer, never shorter.
    np.testing.assert_allclose(costs.seconds, [1.0, 1.0, 2.5, 2.5])
    assert costs.gap == 0.0


def noted(
    acceptance: Acceptance, row: int, match_len: int, num_right: int, *, is_over: bool
) -> None:
    rows = np.array([row])
    match_lens = np.array([match_len], np.int32)
    acceptance.note(rows, match_lens, np.array([num_right], np.int32), np.array([is_over]))


def of(acceptance: Acceptance, row: int, match_len: int) -> float:
    return float(acceptance.of(np.array([row]), np.array([match_len], np.int32))[0])


def test_before_anything_is_seen_a_longer_match_promises_more() -> None:
    acceptance = Acceptance(2)
    promised = [of(acceptance, 1, match_len) for match_len in range(1, LONGEST_MATCH + 1)]
    assert promised == sorted(promised)
    assert (promised[0], promised[-1]) == pytest.approx(FIRST_ESTIMATE)
    assert of(acceptance, 0, 1000) == promised[-1]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_row_is_known_by_what_became_of_its_drafts(share: float) -> None:
    """Each of 5 tokens is right with the same probability; what comes behind the first wrong one is
    not looked at."""
    acceptance = Acceptance(2)
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(1000):
        is_wrong = rng.random(5) >= share
        num_right = int(is_wrong.argmax()) if is_wrong.any() else 5
        noted(acceptance, 0, 4, num_right, is_over=bool(is_wrong.any()))
        seen.append(of(acceptance, 0, 4))
    assert np.mean(seen[200:]) == pytest.approx(share, abs=0.05)


def test_a_few_wrong_drafts_of_a_row_weigh_more_than_all_others_right_ones() -> None:
    acceptance = Acceptance(2)
    for _ in range(100):
        noted(acceptance, 0, 8, 5, is_over=False)
    assert of(acceptance, 1, 8) > 0.95
    for _ in range(4):
        noted(acceptance, 1, 8, 0, is_over=True)
    assert of(acceptance, 1, 8) < 0.4
    assert of(acceptance, 0, 8) > 0.9


def test_statistics_of_a_row_are_forgotten_and_those_of_all_rows_are_not() -> None:
    acceptance = Acceptance(3)
    for _ in range(200):
        noted(acceptance, 0, 2, 0, is_over=True)
    acceptance.reset(0)
    assert of(acceptance, 0, 2) == of(acceptance, 2, 2) < 0.1
    # Other matches say nothing about these.
    assert of(acceptance, 0, 3) == of(Acceptance(1), 0, 3)


def test_drafts_of_one_step_count_each_whatever_their_rows_have_in_common() -> None:
    together = Acceptance(3)
    apart = Acceptance(3)
    rows = np.arange(2)
    match_lens = np.array([5, 5], np.int32)
    together.note(rows, match_lens, np.array([3, 0], np.int32), np.array([True, True]))
    noted(apart, 0, 5, 3, is_over=True)
    noted(apart, 1, 5, 0, is_over=True)
    for row in range(3):
        assert of(together, row, 5) == pytest.approx(of(apart, row, 5), rel=0.01)
