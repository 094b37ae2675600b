"""Detects that the peer of a session sends nothing although it answers pings: the peer has to
answer a probe.

Counts ticks of this process's own event loop rather than seconds: after a pause of this process no
peer counts as silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_SECONDS = 0.5
PROBE_TICKS = 6
"""Number of silent ticks after which the peer is probed."""
LOST_TICKS = 16
"""Number of silent ticks after which the peer counts as lost. A paused process, which answers no
pings, is lost before that."""


class Silence:
    def __init__(self, probe: Callable[[], bool]) -> None:
        """`probe` is called when nothing came for long; it returns False where no answer is due."""
        self._probe = probe
        self._num_ticks = 0

    def on_frame(self) -> None:
        self._num_ticks = 0

    async def until_lost(self) -> None:
        """Returns when the peer has not answered in time."""
        self._num_ticks = 0
        while self._num_ticks < LOST_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            self._num_ticks += 1
            if self._num_ticks >= PROBE_TICKS and not self._probe():
                self._num_ticks = 0
