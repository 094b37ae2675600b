"""The factor on expected gains follows what drafts brought, and a rest follows what they lost."""

from __future__ import annotations

import pytest

from headwater.engine_core.drafting.realized_gain import (
    CHECKED_STEPS,
    FIRST_STEPS,
    IMPROVED,
    LEAST_FACTOR,
    LONG_PAUSE,
    MOST_DOUBLINGS,
    NO_GAIN,
    UNSETTLED_STEPS,
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
    gain.end()
    assert gain.factor == pytest.approx(1.0 - 0.5 * (1.0 - LEAST_FACTOR))
    gain.end()
    assert gain.factor == pytest.approx(1.0 - 0.5 * (1.0 - LEAST_FACTOR)), "nothing was noted"


def lose(gain: RealizedGain, expected: float = 2.0) -> None:
    """A stretch of one step that brings one token in two seconds, where a plain step takes one."""
    gain.begin(expected)
    gain.note(expected, 1, 1, 2.0)
    gain.end()


def seconds_of_rest(gain: RealizedGain) -> int:
    """Plain steps of a second until drafts may be tried."""
    num_steps = 0
    while gain.promised(2.0) == NO_GAIN:
        gain.note_plain(1, 1.0)
        num_steps += 1
    return num_steps - UNSETTLED_STEPS


def test_a_rest_is_a_hundred_times_as_long_as_what_was_lost_and_doubles_while_drafts_lose() -> None:
    gain = RealizedGain(plain_of(1.0))
    rests = []
    for _ in range(MOST_DOUBLINGS + 2):
        lose(gain)
        rests.append(seconds_of_rest(gain))
    assert rests == [100, 200, 400, 800, 1600, 1600]
    assert gain.factor == 1.0


def test_a_stretch_that_gains_ends_the_doubling() -> None:
    gain = RealizedGain(plain_of(1.0))
    for _ in range(3):
        lose(gain)
        seconds_of_rest(gain)
    gain.begin(2.0)
    gain.note(2.0, 1, 4, 2.0)
    gain.end()
    assert seconds_of_rest(gain) == -UNSETTLED_STEPS, "no rest"
    lose(gain)
    assert seconds_of_rest(gain) == 100


def test_drafts_that_promise_much_more_than_those_that_lost_are_tried_during_a_rest() -> None:
    gain = RealizedGain(plain_of(1.0))
    lose(gain, expected=2.0)
    assert gain.promised(2.0 * IMPROVED) == NO_GAIN
    assert gain.promised(2.01 * IMPROVED) == 2.01 * IMPROVED
    lose(gain, expected=2.01 * IMPROVED)
    assert gain.promised(2.01 * IMPROVED) == NO_GAIN
    assert seconds_of_rest(gain) == 300, "both rests, the second one doubled"


def test_an_idle_time_is_no_rest() -> None:
    gain = RealizedGain(plain_of(1.0))
    lose(gain)
    for _ in range(UNSETTLED_STEPS):
        gain.note_plain(1, 1.0)
    gain.note_plain(1, 3600.0)
    assert seconds_of_rest(gain) == 100 - LONG_PAUSE - UNSETTLED_STEPS


def test_a_stretch_ends_once_it_has_lost_a_few_steps() -> None:
    gain = RealizedGain(plain_of(1.0))
    gain.begin(2.0)
    goes_on = [gain.note(2.0, 1, 1, 2.0) for _ in range(5)]
    assert goes_on == [True, True, True, True, False]


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
