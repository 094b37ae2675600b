"""Who may run now: a bounded number at once, a bounded queue behind them, in order of tier, virtual time and arrival.

Whoever waits long rises, a tier at a time, so that nobody starves.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headwater.services import errors

RISE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Waiting:
    tier: int
    virtual_time: float
    arrival: int
    since: float
    turn: asyncio.Future[None]

    def rank(self, now: float) -> tuple[int, float, int]:
        """The smallest goes first."""
        risen = int((now - self.since) / RISE_SECONDS)
        return (max(0, self.tier - risen), self.virtual_time, self.arrival)


class Admission:
    """Turns are given lowest tier first, then to whom the least was given, then first come; a full queue refuses."""

    def __init__(self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.num_running = 0
        self.num_queued = 0
        self._queue: list[tuple[tuple[int, float, int], _Waiting]] = []
        self._clock, self._ranked_at = clock, clock()
        self.queued_by_tier: Counter[int] = Counter()
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, tier: int, virtual_time: float = 0.0) -> AsyncIterator[None]:
        """Scopes one running request. Raises `LimitExceeded` when the queue is full."""
        if self.num_running < self.max_running:
            self.num_running += 1
        else:
            await self._wait(tier, virtual_time)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tier: int, virtual_time: float) -> None:
        if self.num_queued >= self.max_queued:
            raise errors.LimitExceeded(f"{self.num_queued} requests are already waiting", retry_after=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now = self._clock()
        waiting = _Waiting(tier, virtual_time, next(self._arrivals), now, turn)
        heapq.heappush(self._queue, (waiting.rank(now), waiting))
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
        self._rank_again()
        while self._queue:
            _, waiting = heapq.heappop(self._queue)
            if not waiting.turn.done():
                waiting.turn.set_result(None)
                return
        self.num_running -= 1

    def _rank_again(self) -> None:
        """Once a second at most: what has risen meanwhile."""
        if (now := self._clock()) - self._ranked_at >= 1.0:
            self._ranked_at = now
            self._queue = [(waiting.rank(now), waiting) for _, waiting in self._queue if not waiting.turn.done()]
            heapq.heapify(self._queue)
