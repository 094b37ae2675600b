"""Waits for what nothing tells of: by looks that leave most of the time to the processes that are
waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.2
SHARE = 4
"""Time between two looks, in the time that a look takes: a page of metrics costs those who render
and read it."""


def holds_within(
    condition: Callable[[], bool], seconds: float, *, as_long_as: Callable[[], bool] = lambda: True
) -> bool:
    """Whether the condition came to hold in time, while `as_long_as` did."""
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now > end or not as_long_as():
            return False
        time.sleep(min(max(PAUSE_SECONDS, SHARE * (now - begun)), LONGEST_PAUSE_SECONDS))
