"""Takes batches from the queue and sees each to its end, a few at a time. Knows nothing about their lines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from headwater.gateway.batches.durable import FAILURES, Durable
from headwater.gateway.batches.files import Files
from headwater.gateway.batches.ledger import Job, Ledger
from headwater.gateway.batches.line_caller import LineCaller
from headwater.gateway.batches.run import NotMine, Run
from headwater.services.errors import NotFound, Unavailable

MAX_BATCHES = 4
"""That one gateway works on at once; they share its lines."""
MAX_UNKNOWN = 8
"""Deliveries of a job whose batch is not there, before it is given up."""
PAUSE_SECONDS = 1.0
"""Before storage that failed is asked again."""


class Runner:
    """Use within `running`."""

    def __init__(self, durable: Durable, caller: LineCaller, *, max_line_bytes: int) -> None:
        self._durable, self._caller, self._max_line_bytes = durable, caller, max_line_bytes
        self._files, self._ledger = Files(durable), Ledger(durable)
        self._seats = asyncio.Semaphore(MAX_BATCHES)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Runner]:
        """Takes batches for the length of a scope; leaving it gives back those that are not done."""
        taking = asyncio.create_task(self._take())
        try:
            yield self
        finally:
            for task in (taking, *self._tasks):
                task.cancel()
            await asyncio.gather(taking, *self._tasks, return_exceptions=True)

    async def _take(self) -> None:
        while True:
            await self._seats.acquire()
            task = asyncio.create_task(self._work(await self._next_job()))
            self._tasks.add(task)
            task.add_done_callback(self._left)

    async def _next_job(self) -> Job:
        """Waits for one, and for storage to be there."""
        while True:
            try:
                return await self._ledger.next_job()
            except (*FAILURES, Unavailable) as failure:
                structlog.get_logger().debug("no batch taken", error=repr(failure))
                self._durable.forget()
                await asyncio.sleep(PAUSE_SECONDS)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._seats.release()
        if not task.cancelled() and (fault := task.exception()) is not None:
            structlog.get_logger().error("batch runner failed", exc_info=fault)

    async def _work(self, job: Job) -> None:
        log = structlog.get_logger().bind(batch=job.batch_id)
        run = Run(self._files, self._ledger, self._caller, job, max_line_bytes=self._max_line_bytes)
        try:
            async with job.held():
                batch = await run.to_its_end()
            await job.done()
            log.info("batch is over", status=batch.status, completed=batch.request_counts.completed)
        except asyncio.CancelledError:
            await job.give_back()
            raise
        except NotFound:
            # It is written behind its job, a moment later if at all.
            is_lost = job.num_deliveries >= MAX_UNKNOWN
            await (job.done() if is_lost else job.give_back(0.02 * 2**job.num_deliveries))
        except NotMine:
            log.info("batch is another runner's")
        except (*FAILURES, Unavailable) as failure:
            log.warning("batch interrupted", error=repr(failure))
            await job.give_back(PAUSE_SECONDS)
