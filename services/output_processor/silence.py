"""Finds out that the other side of a session says nothing though it answers pings: it is asked, and has to answer.

Counts ticks of this process's own event loop rather than seconds: one that was held up itself blames nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_SECONDS = 0.5
ASK_TICKS = 6
"""Silent ticks after which it is asked."""
LOST_TICKS = 16
"""Silent ticks after which it is given up. A paused process, which answers no pings, is by then."""


class Silence:
    def __init__(self, ask: Callable[[], bool]) -> None:
        """`ask` is called when nothing was heard for long; False: nothing is awaited."""
        self._ask = ask
        self._num_ticks = 0

    def heard(self) -> None:
        self._num_ticks = 0

    async def until_lost(self) -> None:
        """Returns when the other side has not answered in time."""
        self._num_ticks = 0
        while self._num_ticks < LOST_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            self._num_ticks += 1
            if self._num_ticks >= ASK_TICKS and not self._ask():
                self._num_ticks = 0
