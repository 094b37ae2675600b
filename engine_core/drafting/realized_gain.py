"""Compares the gain that drafts were expected to bring with the gain that they brought, by the time
that steps take while requests are served.

Expected gains come from costs that were measured at the start, perhaps on a busy machine, and from
estimated acceptance. A factor on them is learned from stretches of steps with drafts. A stretch
that lost time is followed by a rest, so that drafts which bring nothing cost a small share of the
time.
"""

from __future__ import annotations

from collections.abc import Callable

PLAIN_MEMORY = 0.9
"""Weight of earlier plain steps in the average time of one."""
UNUSUAL = 2.0
"""A plain step counts as this many times the average at most: other work came between."""
FIRST_STEPS = 4
"""Number of first steps of a size whose minimum starts the average, since one of them may follow an
idle time."""
UNSETTLED_STEPS = 2
"""Plain steps after a stretch that are not averaged: some were planned within it."""
LONG_PAUSE = 8.0
"""A step with drafts that took this many times a plain one does not count: the engine was idle."""
CHECKED_STEPS = 8
"""Steps with drafts after which the gain of a running stretch is judged."""
LEAST_FACTOR = 0.25
LEARNED = 0.5
"""Weight of a new stretch in the factor."""
MOST_LOST_STEPS = 4.0
"""Most loss of a stretch of drafting before it ends, in times of a plain step."""
MOST_LOST_SHARE = 0.01
"""Share of the time that stretches may lose: the rest after a stretch lasts the time that it lost
divided by this share."""
MOST_DOUBLINGS = 4
"""Most times that a rest is doubled while stretches keep losing time."""
IMPROVED = 1.25
"""A rest ends early when the expected gain is this many times that of the stretches that lost: the
text has changed."""
NO_GAIN = 1.0


class RealizedGain:
    """Factor between realized and expected gain, for all rows of an engine and one drafter."""

    def __init__(self, plain: PlainSteps) -> None:
        self._plain = plain
        self.factor = 1.0
        """Expected gains times this are the gains to act on, in `LEAST_FACTOR`…1."""
        self._rest = 0.0
        """Seconds of plain steps before drafts are tried again."""
        self._refused_gain = NO_GAIN
        """Largest expected gain among the stretches of drafting that lost and led to the present
        rest."""
        self._num_lost = 0
        """Number of stretches that lost time since the last one that gained."""
        self._num_behind = 0
        """Plain steps that still belong to the last stretch: they were planned within it."""
        self._lost = 0.0
        """Seconds that steps of the stretch took longer than plain ones for the same tokens;
        negative where they were faster."""
        self._begin(NO_GAIN)

    def promised(self, gain: float) -> float:
        """The gain to act on where rows have no drafts; no gain during a rest."""
        if self._rest > 0.0:
            return gain if gain > IMPROVED * self._refused_gain else NO_GAIN
        return gain * self.factor

    def begin(self, expected: float) -> None:
        """A stretch of steps with drafts begins, of which this gain is expected."""
        if self._rest > 0.0:
            self.factor = 1.0
        self._begin(expected)

    def note_plain(self, num_rows: int, seconds: float) -> None:
        """Notes the seconds between a settled step without drafts and the step before it."""
        if self._rest <= 0.0 and self._num_behind == 0:
            return
        plain = self._plain.seconds(num_rows)
        seconds = min(seconds, LONG_PAUSE * plain)
        if self._num_behind > 0:
            self._num_behind -= 1
            self._add_rest(max(seconds - plain, 0.0) if self._num_lost else 0.0)
            return
        self._rest -= seconds
        if self._rest <= 0.0:
            self._end_rest()
            self.factor = 1.0

    def note(self, expected: float, num_rows: int, num_tokens: int, seconds: float) -> bool:
        """Notes a settled step of a stretch with drafts: its expected gain, and the time since the
        step before it. Returns whether the stretch goes on: it ends when it has lost more time than
        a trial may."""
        plain = self._plain.seconds(num_rows)
        if not 0.0 < seconds < LONG_PAUSE * plain:
            return True
        self._num_steps += 1
        self._expected += expected
        self._realized += num_tokens * plain / num_rows
        self._seconds += seconds
        lost = max(self._lost, 0.0) + self._seconds - self._realized
        if lost > MOST_LOST_STEPS * plain:
            return False
        if self._num_steps >= CHECKED_STEPS:
            self._learn()
        return True

    def end(self) -> None:
        """Ends the stretch of steps that is measured."""
        self._learn()
        if self._lost > 0.0:
            self._num_lost += 1
            self._refused_gain = max(self._refused_gain, self._begun_with)
            self._add_rest(self._lost)
        elif self._lost < 0.0:
            self._num_lost = 0
            self._end_rest()
        self._num_behind = UNSETTLED_STEPS
        self._lost = 0.0

    def _end_rest(self) -> None:
        self._rest = 0.0
        self._refused_gain = NO_GAIN

    def _add_rest(self, lost: float) -> None:
        num_doublings = min(max(self._num_lost - 1, 0), MOST_DOUBLINGS)
        self._rest += lost / MOST_LOST_SHARE * 2**num_doublings

    def _learn(self) -> None:
        """Learns the factor from the steps since this was last done."""
        if self._num_steps > 0:
            expected = self._expected / self._num_steps
            ratio = self._realized / self._seconds / expected
            self.factor += LEARNED * (min(max(ratio, LEAST_FACTOR), 1.0) - self.factor)
            self._lost += self._seconds - self._realized
        self._clear()

    def _begin(self, expected: float) -> None:
        self._begun_with = expected
        """Gain that was expected when the stretch began."""
        self._lost = 0.0
        self._clear()

    def _clear(self) -> None:
        self._num_steps = 0
        self._expected = 0.0
        self._realized = 0.0
        """Seconds that plain steps would have taken for the tokens."""
        self._seconds = 0.0


class PlainSteps:
    """Average seconds of steps without drafts, by number of rows to the next power of two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds; with a clock that never advances, expected gains are not corrected."""
        self._clock = clock
        self._last = clock()
        self._is_running = False
        self._num_unsettled = 0
        self._seconds: dict[int, float] = {}
        self._num_seen: dict[int, int] = {}
        """Steps of each size that were averaged, up to `FIRST_STEPS`."""

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step of so many rows, or of the next smaller size that is known; 0: none."""
        size = num_rows.bit_length()
        known = [each for each, count in self._num_seen.items() if count == FIRST_STEPS]
        nearest = max((each for each in known if each <= size), default=None)
        return 0.0 if nearest is None else self._seconds[nearest]

    def elapsed(self) -> float:
        """Seconds since the last call."""
        now = self._clock()
        seconds = now - self._last
        self._last = now
        self._is_running = self._is_running or seconds > 0.0
        return seconds

    def lacks(self, num_rows: int) -> bool:
        """Whether steps of so many rows have to be seen before drafts can be compared with them."""
        return self._is_running and self.seconds(num_rows) == 0.0

    def interrupt(self) -> None:
        """A stretch of steps with drafts begins."""
        self._num_unsettled = UNSETTLED_STEPS

    def note(self, num_rows: int, seconds: float) -> None:
        """Notes the seconds between a settled step without drafts and the step before it."""
        if seconds <= 0.0:
            return
        if self._num_unsettled > 0:
            self._num_unsettled -= 1
            return
        size = num_rows.bit_length()
        average = self._seconds.get(size, seconds)
        if (num_seen := self._num_seen.get(size, 0)) < FIRST_STEPS:
            self._num_seen[size] = num_seen + 1
            self._seconds[size] = min(average, seconds)
        else:
            usual = min(seconds, UNUSUAL * average)
            self._seconds[size] = PLAIN_MEMORY * average + (1 - PLAIN_MEMORY) * usual
