"""Takes work from a queue and does it, a bounded amount at a time. Knows nothing about the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.tasks import end, owned_task, start_in

from ..buckets import FAILURES
from .durable import Durable

PAUSE_SECONDS = 1.0
"""Seconds before storage that failed is tried again."""
MAX_PAUSE_SECONDS = 30.0
"""Longest pause after an unforeseen error; it doubles from error to error."""
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
        try:
            # It ends first: it may take work once more on its way out.
            async with owned_task(self._run()):
                yield
        finally:
            await end(*self._tasks)

    async def _run(self) -> None:
        while True:
            await self._seats.acquire()
            task = start_in(self._tasks, self._work(await self._next()))
            task.add_done_callback(lambda _: self._seats.release())

    async def _next(self) -> WorkT:
        """Waits for work, and for storage to be there. An unforeseen error is logged, and does not end it."""
        num_errors = 0
        while True:
            try:
                return await self._take()
            except (*FAILURES, Unavailable) as failure:
                structlog.get_logger().debug("no work taken", error=repr(failure))
                num_errors = 0
            except Exception:
                structlog.get_logger().exception("work cannot be taken")
                num_errors += 1
            self._durable.forget()
            await asyncio.sleep(min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** min(num_errors, 10)))
