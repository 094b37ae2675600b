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
from .busy import rest_seconds
from .durable import Durable
from .work_lease import WorkLease

PAUSE_SECONDS = 1.0
"""Seconds before storage that failed is tried again."""
MAX_PAUSE_SECONDS = 30.0
"""Longest pause after an unforeseen error; it doubles from error to error."""
MAX_ERRORS = 5
"""Most unexpected errors of one piece of work before it is given up. Deaths of processes do not
count, nor does work that is handed back."""
WorkT = TypeVar("WorkT", bound=WorkLease)


class Workers(Generic[WorkT]):
    """Workers of one queue. Use within `running`."""

    def __init__(
        self,
        durable: Durable,
        take: Callable[[], Awaitable[WorkT]],
        work: Callable[[WorkT], Coroutine[Any, Any, None]],
        count_error: Callable[[WorkT], Awaitable[bool]],
        num_seats: int,
    ) -> None:
        """`count_error` is called for work that ended by an unforeseen error. It counts errors
        where all gateways see them, gives the work up after `MAX_ERRORS`, and returns whether it
        did."""
        self._durable = durable
        self._take = take
        self._work = work
        self._count_error = count_error
        self._seats = asyncio.Semaphore(num_seats)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes work inside the `with` block; leaving it cancels unfinished work."""
        try:
            # The worker is stopped first, since it may take one more piece of work while it ends.
            async with owned_task(self._run()):
                yield
        finally:
            await end(*self._tasks)

    async def _run(self) -> None:
        while True:
            await self._seats.acquire()
            task = start_in(self._tasks, self._do(await self._next()))
            task.add_done_callback(lambda _: self._seats.release())

    async def _next(self) -> WorkT:
        """Waits for work, and for storage to be there. An unforeseen error is logged, and does not
        end it."""
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

    async def _do(self, held: WorkT) -> None:
        try:
            await self._work(held)
        except Exception:
            structlog.get_logger().exception("work failed", kind=type(held).__name__)
            await self._end_or_give_back(held)

    async def _end_or_give_back(self, held: WorkT) -> None:
        is_over = False
        try:
            async with held.held():
                is_over = await self._count_error(held)
        except Exception:
            structlog.get_logger().exception(
                "failed work is tried again uncounted", kind=type(held).__name__
            )
        if not is_over:
            await held.give_back(rest_seconds(held.num_deliveries))
            return
        with contextlib.suppress(*FAILURES):
            await held.done()
