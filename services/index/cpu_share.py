"""Measures the share of a core that following events takes. When it is too large for too long, the
index in Redis is read instead."""

from __future__ import annotations

_WINDOW_SECONDS = 1.0
_PATIENCE = 3
"""Number of windows in a row with too large a share."""
REST_SECONDS = 30.0
"""Seconds until following is tried again."""


class CpuShare:
    """Share of a core. Work is in seconds of a core; `now` is in seconds of a monotonic clock."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._spent = 0.0
        self._since = 0.0
        self._num_over = 0
        self._was_late = False
        self._rests_until: float | None = None

    @property
    def is_resting(self) -> bool:
        return self._rests_until is not None

    def add(self, work: float, now: float, *, is_late: bool = False) -> bool:
        """Adds the work of one batch; returns True when the share has become too large. `is_late`:
        batches before it were lost because they were not read in time, which is too much however
        little work it is."""
        self._spent += work
        self._was_late |= is_late
        if now - self._since < _WINDOW_SECONDS:
            return False
        is_over = self._was_late or self._spent > self._max_share * (now - self._since)
        self._num_over = self._num_over + 1 if is_over else 0
        self._spent = 0.0
        self._since = now
        self._was_late = False
        if self._num_over < _PATIENCE:
            return False
        self._num_over = 0
        return True

    def rest(self, now: float) -> None:
        self._rests_until = now + REST_SECONDS

    def try_again(self, now: float) -> bool:
        """Returns True once, when the rest is over."""
        if self._rests_until is None or now < self._rests_until:
            return False
        self._rests_until = None
        self._since = now
        self._spent = 0.0
        self._was_late = False
        return True
