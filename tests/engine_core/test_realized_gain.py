"""The factor on expected gains follows what drafts brought, and comes back with time."""

from __future__ import annotations

import pytest

from headwater.engine_core.drafting.realized_gain import (
    CHECKED_STEPS,
    FIRST_STEPS,
    LEAST_FACTOR,
    PlainSteps,
    RealizedGain,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_of(seconds: float, num_rows: int = 1) -> PlainSteps:
    steps = PlainSteps(Clock())
    for _ in range(FIRST_STEPS):
        steps.note(num_rows, seconds)
    return steps


def stretch(gain: RealizedGain, expected: float, num_tokens: int, seconds: float) -> None:
    for _ in range(CHECKED_STEPS):
        gain.note(expected, 1, num_tokens, seconds)


def test_drafts_that_bring_what_was_expected_leave_the_factor_at_one() -> None:
    gain = RealizedGain(plain_of(1.0))
    stretch(gain, expected=1.5, num_tokens=3, seconds=2.0)
    assert gain.factor == 1.0


@pytest.mark.parametrize("num_stretches", [1, 2, 3])
def test_each_stretch_halves_the_distance_to_the_ratio_of_the_gains(num_stretches: int) -> None:
    """Two tokens in two seconds are no gain, where a gain of two was expected."""
    gain = RealizedGain(plain_of(1.0))
    for _ in range(num_stretches):
        stretch(gain, expected=2.0, num_tokens=2, seconds=2.0)
    assert gain.factor == pytest.approx(0.5 + 0.5**num_stretches * 0.5)


def test_a_stretch_that_ends_early_counts() -> None:
    gain = RealizedGain(plain_of(1.0))
    gain.note(2.0, 1, 1, 2.0)
    gain.judge()
    assert gain.factor == pytest.approx(1.0 - 0.5 * (1.0 - LEAST_FACTOR))
    gain.judge()
    assert gain.factor == pytest.approx(1.0 - 0.5 * (1.0 - LEAST_FACTOR)), "nothing was noted"


def test_plain_steps_bring_the_factor_back() -> None:
    gain = RealizedGain(plain_of(1.0))
    for _ in range(20):
        stretch(gain, expected=4.0, num_tokens=1, seconds=1.0)
    assert gain.factor == pytest.approx(LEAST_FACTOR, abs=0.01)
    for _ in range(5000):
        gain.recover()
    assert 0.7 < gain.factor < 0.8
    for _ in range(25_000):
        gain.recover()
    assert gain.factor == pytest.approx(1.0, abs=0.01)


def test_nothing_is_learned_before_plain_steps_were_seen_or_while_the_engine_was_idle() -> None:
    gain = RealizedGain(PlainSteps(Clock()))
    stretch(gain, expected=2.0, num_tokens=1, seconds=5.0)
    assert gain.factor == 1.0
    gain = RealizedGain(plain_of(1.0))
    stretch(gain, expected=2.0, num_tokens=1, seconds=60.0)
    assert gain.factor == 1.0


def test_a_plain_step_that_follows_an_idle_time_is_not_the_average() -> None:
    steps = PlainSteps(Clock())
    for seconds in (60.0, 1.0, 1.25, 1.5):
        steps.note(1, seconds)
    assert steps.seconds(1) == 1.0
    steps.note(1, 60.0)
    assert steps.seconds(1) == pytest.approx(1.1), "twice the average at most"


def test_more_rows_are_compared_with_the_next_smaller_size_that_is_known() -> None:
    steps = plain_of(1.0, num_rows=2)
    assert [steps.seconds(n) for n in (1, 2, 3, 64)] == [0.0, 1.0, 1.0, 1.0]


def test_the_first_plain_steps_behind_a_stretch_do_not_count() -> None:
    steps = plain_of(1.0)
    steps.interrupt()
    for seconds in (1.9, 1.9, 1.0):
        steps.note(1, seconds)
    assert steps.seconds(1) == 1.0


def test_time_is_counted_from_the_last_look() -> None:
    clock = Clock()
    steps = PlainSteps(clock)
    clock.now = 2.5
    assert [steps.elapsed(), steps.elapsed()] == [2.5, 0.0]
