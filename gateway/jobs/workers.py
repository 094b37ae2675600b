"""Takes work from a queue and does it, a bounded amount at a time. Knows nothing about the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.tasks import end

from ..buckets import FAILURES
from .durable import Durable

PAUSE_SECONDS = 1.0
"""Seconds before storage that failed is tried again."""
WorkT = TypeVar("WorkT")


class Workers(Generic[WorkT]):
    """Workers of one queue. Use within `running`."""

    def __init__(
        self,
        durable: Durable,
        take: Callable[[], Awaitable[WorkT]],
        work: Callable[[WorkT], Coroutine[Any, Any, None]],
        num_seats: int,
    ) -> None:
        self._durable, self._take, self._work = durable, take, work
        self._seats = asyncio.Semaphore(num_seats)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes work for the length of a scope; leaving it cancels unfinished work."""
        taking = asyncio.create_task(self._run())
        try:
            yield
        finally:
            # In this order: the first may take work once more on its way out.
            await end(taking)
            await end(*self._tasks)

    async def _run(self) -> None:
        while True:
            await self._seats.acquire()
            task = asyncio.create_task(self._work(await self._next()))
            self._tasks.add(task)
            task.add_done_callback(self._left)

    async def _next(self) -> WorkT:
        """Waits for work, and for storage to be there."""
        while True:
            try:
                return await self._take()
            except (*FAILURES, Unavailable) as failure:
                structlog.get_logger().debug("no batch taken", error=repr(failure))
                self._durable.forget()
                await asyncio.sleep(PAUSE_SECONDS)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._seats.release()
        if not task.cancelled() and (fault := task.exception()) is not None:
            structlog.get_logger().error("batch runner failed", exc_info=fault)
