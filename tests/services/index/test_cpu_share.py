from __future__ import annotations

import pytest

from headwater.services.index.cpu_share import REST_SECONDS, CpuShare

BATCHES_PER_SECOND = 10


def seconds_until_too_much(work_per_second: list[float]) -> int | None:
    """The second of wall time in which it became too much, under so much work in each."""
    cpu_share = CpuShare(0.6)
    for second, work in enumerate(work_per_second):
        for batch in range(1, BATCHES_PER_SECOND + 1):
            if cpu_share.add(work / BATCHES_PER_SECOND, second + batch / BATCHES_PER_SECOND):
                return second
    return None


@pytest.mark.parametrize(
    ("work_per_second", "expected"),
    [
        ([0.5] * 20, None),
        ([0.7] * 20, 2),
        # A burst, and a quiet second between two of them.
        ([0.9, 0.9, 0.1, 0.9, 0.9, 0.1], None),
        ([0.1, 0.9, 0.9, 0.9], 3),
    ],
)
def test_more_than_its_share_of_a_core_for_three_seconds_in_a_row_is_too_much(
    work_per_second: list[float], expected: int | None
) -> None:
    assert seconds_until_too_much(work_per_second) == expected


def test_to_lose_batches_for_want_of_a_core_is_too_much_however_little_work_they_are() -> None:
    cpu_share = CpuShare(0.6)
    assert [cpu_share.add(0.01, float(second), is_late=second > 1) for second in range(1, 5)] == [
        False
    ] * 3 + [True]


def test_events_are_tried_again_once_after_a_rest_with_counts_from_zero() -> None:
    cpu_share = CpuShare(0.6)
    cpu_share.rest(100.0)
    assert cpu_share.is_resting
    assert not cpu_share.try_again(100.0 + REST_SECONDS - 1)
    assert cpu_share.try_again(100.0 + REST_SECONDS)
    assert not cpu_share.is_resting
    assert not cpu_share.try_again(100.0 + REST_SECONDS)
    assert not cpu_share.add(0.5, 100.0 + REST_SECONDS + 1)
