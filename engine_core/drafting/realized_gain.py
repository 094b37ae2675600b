"""Compares the gain that drafts were expected to bring with the gain that they brought, by the time
that steps take while requests are served.

Expected gains come from costs that were measured at the start, perhaps on a busy machine, and from
estimated acceptance. A factor on them, learned from stretches of steps with drafts, keeps a wrong
expectation from costing time again and again.
"""

from __future__ import annotations

from collections.abc import Callable

PLAIN_MEMORY = 0.9
"""Weight of earlier plain steps in the average time of one."""
UNUSUAL = 2.0
"""A plain step counts as this many times the average at most: other work came between."""
FIRST_STEPS = 4
"""Steps of a size of which the least is the first average: one of them may follow an idle time."""
UNSETTLED_STEPS = 2
"""Plain steps behind a stretch that are not averaged: some were planned within it."""
LONG_PAUSE = 8.0
"""A step with drafts that took this many times a plain one does not count: the engine was idle."""
CHECKED_STEPS = 8
"""Steps with drafts after which a stretch that goes on is judged."""
LEAST_FACTOR = 0.25
LEARNED = 0.5
"""Weight of a new stretch in the factor."""
RECOVERY_STEPS = 5000
"""Plain steps in which the factor comes most of the way back to 1: drafts are tried again then."""


class RealizedGain:
    """One factor, for all rows of an engine and one way of drafting."""

    def __init__(self, plain: PlainSteps) -> None:
        self._plain = plain
        self.factor = 1.0
        """Expected gains times this are the gains to act on, in `LEAST_FACTOR`…1."""
        self._clear()

    def recover(self) -> None:
        """A step without drafts was settled."""
        self.factor += (1.0 - self.factor) / RECOVERY_STEPS

    def note(self, expected: float, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of a stretch with drafts was settled: the gain that was expected of it, and the
        time since the step before it."""
        plain = self._plain.seconds(num_rows)
        if not 0.0 < seconds < LONG_PAUSE * plain:
            return
        self._num_steps += 1
        self._expected += expected
        self._realized += num_tokens * plain / num_rows
        self._seconds += seconds
        if self._num_steps >= CHECKED_STEPS:
            self.judge()

    def judge(self) -> None:
        """Learns from the stretch of steps so far, and begins a new one."""
        if self._num_steps > 0:
            expected = self._expected / self._num_steps
            ratio = self._realized / self._seconds / expected
            self.factor += LEARNED * (min(max(ratio, LEAST_FACTOR), 1.0) - self.factor)
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
        """`clock`: seconds; one that stands still leaves expected gains as they are."""
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
        """A step without drafts was settled so long after the one before it."""
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
