"""How late events come: the 99th percentile of the last few hundred.

Ages of events are read from two clocks. The least age that a replica's events had lately is
subtracted, since the offset of its clock cannot be told from the shortest way: what is left is by
how much events came later than that.
"""

from __future__ import annotations

import math
from collections import deque

from .replica import Incarnation

LEAST_SECONDS = 60.0
"""Length of a window: minimum ages are those of this window and the one before. A clock that is set
back is known by its new offset after two windows."""
MAX_SECONDS = 10.0
"""Longest time for which a late event is expected: a prompt that is wrongly taken for cached costs
trust."""
_NUM_KEPT = 512
_EVERY = 32
"""Events between two looks; sorting each time would cost more than it tells."""


class EventLag:
    """`p99` is 0 until something was observed."""

    def __init__(self) -> None:
        self.p99 = 0.0
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self._least: dict[Incarnation, float] = {}
        self._least_before: dict[Incarnation, float] = {}
        self._window_ends_at = -math.inf

    @property
    def expected_within(self) -> float:
        """Seconds after which an event that has not come is expected no more."""
        return min(2 * self.p99, MAX_SECONDS)

    def observe(self, incarnation: Incarnation, age: float, now: float) -> float:
        """Takes the age of an event by both clocks; returns its lag. Both are seconds, and an age
        may be negative."""
        seconds = age - self._least_age(incarnation, age, now)
        self._seconds.append(seconds)
        self._num_new += 1
        if self._num_new >= _EVERY or len(self._seconds) < _EVERY:
            self._num_new = 0
            self.p99 = sorted(self._seconds)[len(self._seconds) * 99 // 100]
        return seconds

    def _least_age(self, incarnation: Incarnation, age: float, now: float) -> float:
        if now >= self._window_ends_at:
            self._least, self._least_before = {}, self._least
            self._window_ends_at = now + LEAST_SECONDS
        least = self._least[incarnation] = min(age, self._least.get(incarnation, age))
        return min(least, self._least_before.get(incarnation, least))
