"""Circuit breaker of a replica: pauses after failures, longer each time, then lets one request try
it before the rest."""

from __future__ import annotations

_FIRST_SECONDS = 1.0
_MAX_SECONDS = 30.0


class Breaker:
    """Closed: requests pass. Open: none does until `retry_at`; then one passes, and its outcome
    decides."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._retry_at = 0.0
        self._is_tried = False

    def is_open(self, now: float) -> bool:
        return now < self._retry_at

    def sent(self, now: float) -> None:
        """Notes that a request is sent there; after a failure no other one is, for another
        pause."""
        if self._pause:
            self._is_tried = True
            self._retry_at = now + self._pause

    def failed(self, now: float) -> None:
        """NOTE: many requests fail together when a replica dies; that is one failure."""
        if self._is_tried or not self._pause:
            self._pause = min(_MAX_SECONDS, 2 * self._pause or _FIRST_SECONDS)
        self._is_tried = False
        self._retry_at = now + self._pause

    def succeeded(self) -> None:
        self._pause = self._retry_at = 0.0
        self._is_tried = False
