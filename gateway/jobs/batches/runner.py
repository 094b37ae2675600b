"""Takes batches from the queue and runs each to its end, a few at a time; all gateways answer their
lines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import structlog

from headwater.services.runtime.errors import NotFound, Unavailable

from ...buckets import FAILURES
from ..tenant_storage import TenantStorage
from ..workers import PAUSE_SECONDS, Workers
from .ledger import Job, Ledger
from .line_caller import LineCaller
from .range_runner import RangeRunner
from .run import NotMine, Run

MAX_BATCHES = 6
MAX_BATCHES_OF_TENANT = 4
"""Most batches that one gateway runs at once, and most of these that belong to one tenant, so that
others find seats."""
TURN_SECONDS = 5.0
"""Seconds that a batch waits whose tenant has no seat."""
MAX_UNKNOWN = 8
"""Most deliveries of a job whose batch is unknown before it is dropped."""


class Runner:
    """Runs batches from the queue. Use within `running`."""

    def __init__(self, storage: TenantStorage, caller: LineCaller, *, max_line_bytes: int) -> None:
        durable = storage.durable
        self._storage = storage
        self._max_line_bytes = max_line_bytes
        self._workers = Workers(
            durable, Ledger(durable).next_job, self._work, self._count_error, MAX_BATCHES
        )
        self._ranges = RangeRunner(durable, caller)
        self._num_running: Counter[str] = Counter()
        """Number of batches that run, by tenant."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Runner]:
        """Runs batches inside this context. At its end, unfinished batches are given back to the
        queue."""
        async with self._ranges.running(), self._workers.running():
            yield self

    async def _work(self, job: Job) -> None:
        if self._num_running[job.tenant] >= MAX_BATCHES_OF_TENANT:
            await job.give_back(TURN_SECONDS)
            return
        self._num_running[job.tenant] += 1
        try:
            await self._run_to_its_end(job)
        finally:
            self._num_running -= Counter({job.tenant: 1})

    async def _run_to_its_end(self, job: Job) -> None:
        log = structlog.get_logger().bind(batch=job.batch_id)
        run = self._run(job)
        try:
            async with job.held():
                batch = await run.to_its_end()
            await job.done()
            log.info("batch is over", status=batch.status, completed=batch.request_counts.completed)
        except asyncio.CancelledError:
            await job.give_back()
            raise
        except NotFound:
            # The record is written after the job ends, and may be missing.
            is_lost = job.num_deliveries >= MAX_UNKNOWN
            await (job.done() if is_lost else job.give_back(0.02 * 2**job.num_deliveries))
        except NotMine:
            log.info("batch is another runner's")
        except (*FAILURES, Unavailable) as failure:
            log.warning("batch interrupted", error=repr(failure))
            await job.give_back(PAUSE_SECONDS)

    async def _count_error(self, job: Job) -> bool:
        return await self._run(job).count_error()

    def _run(self, job: Job) -> Run:
        return Run(self._storage, job.tenant, job.batch_id, max_line_bytes=self._max_line_bytes)
