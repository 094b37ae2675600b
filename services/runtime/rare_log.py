"""Log of what clients can bring about at any rate: one line a minute for each kind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog

SECONDS = 60.0
MAX_KINDS = 256


class RareLog:
    """Log of one place in the code that writes each kind of event rarely. A kind is an event with
    the values that distinguish causes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, ...], float] = {}
        self._left_out = Counter[tuple[str, ...]]()
        """Number of lines since the last one, by kind."""

    def add(self, event: str, *kind: str, **about: object) -> None:
        """Logs a line at most once a minute for each kind. The next line says how many were left
        out."""
        key = (event, *kind)
        now = self._clock()
        if now - self._logged_at.get(key, -SECONDS) < SECONDS:
            self._left_out[key] += 1
            return
        if len(self._logged_at) >= MAX_KINDS:
            self._logged_at.clear()
            self._left_out.clear()
        self._logged_at[key] = now
        if left_out := self._left_out.pop(key, 0):
            about |= {"left_out": left_out}
        structlog.get_logger().warning(event, **about)
