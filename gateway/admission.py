"""Who may run now: a bounded number at once, a bounded queue behind them, in order of tier and arrival."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from headwater.services import errors


class Admission:
    """Turns are given lowest tier first, then first come; a full queue refuses."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.num_running = 0
        self.num_queued = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self.queued_by_tier: Counter[int] = Counter()
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, tier: int) -> AsyncIterator[None]:
        """Scopes one running request. Raises `LimitExceeded` when the queue is full."""
        if self.num_running < self.max_running:
            self.num_running += 1
        else:
            await self._wait(tier)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tier: int) -> None:
        if self.num_queued >= self.max_queued:
            raise errors.LimitExceeded(f"{self.num_queued} requests are already waiting", retry_after=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (tier, next(self._arrivals), turn))
        self.num_queued += 1
        self.queued_by_tier[tier] += 1
        try:
            await turn
        except asyncio.CancelledError:
            # A turn that was given in the same moment must not be lost.
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise
        finally:
            self.num_queued -= 1
            self.queued_by_tier[tier] -= 1
            if not self.queued_by_tier[tier]:
                del self.queued_by_tier[tier]

    def _pass_on(self) -> None:
        """The turn goes to the next one who still waits, or is free again."""
        while self._queue:
            *_, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self.num_running -= 1
