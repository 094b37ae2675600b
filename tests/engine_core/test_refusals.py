from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.refusals import Due, refusals


def num_in_time(jobs: list[tuple[float, float]]) -> int:
    """The most jobs of any choice that are in time, computed in order of due times."""
    best = 0
    for chosen in itertools.product([False, True], repeat=len(jobs)):
        end = 0.0
        is_feasible = True
        for (by, seconds), is_chosen in zip(jobs, chosen, strict=True):
            end += seconds * is_chosen
            is_feasible &= not is_chosen or end <= by
        best = max(best, sum(chosen) * is_feasible)
    return best


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), max_size=8))
def test_no_other_choice_leaves_more_requests_in_time(drawn: list[tuple[int, int]]) -> None:
    jobs = sorted((float(by), float(seconds)) for by, seconds in drawn)
    queue = [(Due(by, seconds, True), number) for number, (by, seconds) in enumerate(jobs)]
    refused = dict(refusals(queue, 0.0))
    kept = [job for number, job in enumerate(jobs) if number not in refused]
    ends = itertools.accumulate(seconds for _, seconds in kept)
    assert all(end <= by for end, (by, _) in zip(ends, kept, strict=True))
    assert len(kept) == num_in_time(jobs)
    assert all(late > 0 for late in refused.values())


def test_what_may_not_be_refused_stays_and_is_counted() -> None:
    queue = [
        (Due(5.0, 4.0, False), "begun"),
        (Due(6.0, 1.0, True), "short"),
        (Due(7.0, 9.0, True), "long"),
        (Due(8.0, 1.0, True), "last"),
    ]
    assert list(refusals(queue, 1.0)) == [("long", 8.0)]
    assert list(refusals(queue[:1], 9.0)) == []
