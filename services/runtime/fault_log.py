"""Log of the faults after which a background task goes on: each once, however often it repeats."""

from __future__ import annotations

import structlog


class FaultLog:
    """Log of one task. Use `add` for each fault, and `clear` when the task succeeds."""

    def __init__(self, event: str, expected: tuple[type[Exception], ...] = ()) -> None:
        """`expected` are kinds of errors that say enough without a traceback."""
        self._event = event
        self._expected = expected
        self._last = ""

    def add(self, fault: Exception, **about: str) -> None:
        """Logs the fault, unless the last one was the same."""
        problem = f"{type(fault).__name__}: {fault}"
        if (text := f"{problem} {about}") != self._last:
            traceback = None if isinstance(fault, self._expected) else fault
            structlog.get_logger().error(self._event, **about, error=problem, exc_info=traceback)
            self._last = text

    def clear(self) -> None:
        self._last = ""
