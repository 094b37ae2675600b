"""How late events come: the 99th percentile of the last few hundred."""

from __future__ import annotations

from collections import deque

_NUM_KEPT = 512
_EVERY = 32
"""Events between two looks; sorting each time would cost more than it tells."""


class EventLag:
    """`p99` is 0 until something was observed."""

    def __init__(self) -> None:
        self.p99 = 0.0
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0

    def observe(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._num_new += 1
        if self._num_new >= _EVERY or len(self._seconds) < _EVERY:
            self._num_new = 0
            self.p99 = sorted(self._seconds)[len(self._seconds) * 99 // 100]
