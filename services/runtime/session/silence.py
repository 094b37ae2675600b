"""Finds out that the other side of a session sends nothing though it answers pings: a probe has to be answered.

Counts ticks of this process's own event loop rather than seconds: a process that was held up itself blames no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_SECONDS = 0.5
PROBE_TICKS = 6
"""Silent ticks after which it is probed."""
LOST_TICKS = 16
"""Silent ticks after which it counts as lost. A paused process, which answers no pings, is lost before that."""


class Silence:
    def __init__(self, probe: Callable[[], bool]) -> None:
        """`probe` is called when nothing came for long; False: no answer is due."""
        self._probe = probe
        self._num_ticks = 0

    def on_frame(self) -> None:
        self._num_ticks = 0

    async def until_lost(self) -> None:
        """Returns when the other side has not answered in time."""
        self._num_ticks = 0
        while self._num_ticks < LOST_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            self._num_ticks += 1
            if self._num_ticks >= PROBE_TICKS and not self._probe():
                self._num_ticks = 0
