"""Log of errors that no code foresees: with their traceback once a minute for each kind, and one
line for each of the others."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

SECONDS = 60.0
MAX_KINDS = 256
MAX_CHARS = 500
"""Characters of an error that is logged without its traceback."""


class UnforeseenLog:
    """Log of unexpected errors of one process. A kind of error is its type and the line of code
    that raised it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at: dict[tuple[type[BaseException], str], float] = {}
        """Time of the last traceback, by kind."""

    def add(self, fault: BaseException, event: str = "unforeseen", **about: object) -> None:
        """Logs an error. `event` says what failed."""
        place = _place(fault)
        log = structlog.get_logger()
        if self._is_due((type(fault), place)):
            log.error(event, **about, exc_info=fault)
        else:
            error = f"{type(fault).__name__}: {fault}"[:MAX_CHARS]
            log.error(event, **about, error=error, place=place)

    def _is_due(self, kind: tuple[type[BaseException], str]) -> bool:
        now = self._clock()
        if now - self._shown_at.get(kind, -SECONDS) < SECONDS:
            return False
        if len(self._shown_at) >= MAX_KINDS:
            self._shown_at.clear()
        self._shown_at[kind] = now
        return True


def _place(fault: BaseException) -> str:
    """File and line that raised an error."""
    traceback = fault.__traceback__
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


unforeseen = UnforeseenLog()
