"""Services that a gateway does without for now: NATS, Redis, a Redis that answers in time, the
events of caches.

It watches and reports. The code that needs a service finds out by itself, and goes on without.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import structlog
from prometheus_client import CollectorRegistry

from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.store import READ_SECONDS, STORE_FAILURES, Store
from headwater.services.runtime.tasks import owned_task

from ..counters import LabelledGauges

ASK_SECONDS = 1.0
NUM_LATE = 3
"""Number of late answers in a row that count as an outage: one alone may be this process's own
fault."""
NATS = "nats"
REDIS = "redis"
REDIS_IN_TIME = "redis in time"
EVENTS = "events"
GAUGE = {"headwater_without": "1: what the gateway goes without for now"}


class Outages:
    """Outages of the services of one gateway. Use within `running`. A service that is not
    configured is not missed."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        feed: IndexFeed,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._store = store
        self._feed = feed
        self._clock = clock
        self._answers: deque[float | None] = deque(maxlen=NUM_LATE)
        """Seconds that each answer of Redis took; None: it did not answer."""
        registry.register(
            LabelledGauges(
                "what",
                GAUGE,
                lambda: ((what, [is_out]) for what, is_out in self._is_missed().items()),
            )
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Outages]:
        async with owned_task(self._watch()):
            yield self

    def now(self) -> tuple[str, ...]:
        return tuple(what for what, is_missed in self._is_missed().items() if is_missed)

    def _is_missed(self) -> dict[str, bool]:
        return {
            NATS: self._bus.url is not None and not self._bus.connected,
            REDIS: bool(self._answers) and self._answers[-1] is None,
            REDIS_IN_TIME: len(self._answers) == NUM_LATE
            and all(seconds is not None and seconds > READ_SECONDS for seconds in self._answers),
            EVENTS: self._feed.is_read_through,
        }

    async def _watch(self) -> None:
        before: tuple[str, ...] = ()
        while True:
            if self._store.url is not None:
                self._answers.append(await self._probe())
            if (missed := self.now()) != before:
                structlog.get_logger().warning(
                    "what is gone without has changed", without=missed, before=before
                )
                before = missed
            await asyncio.sleep(ASK_SECONDS)

    async def _probe(self) -> float | None:
        began = self._clock()
        try:
            await self._store.command("PING")
        except STORE_FAILURES:
            return None
        return self._clock() - began
