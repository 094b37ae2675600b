"""Answers ranges of lines, of whichever batch is next in the queue. Gateways do so side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from headwater.gateway.batches.durable import FAILURES, Durable
from headwater.gateway.batches.files import Files
from headwater.gateway.batches.insist import insist
from headwater.gateway.batches.ledger import Ledger
from headwater.gateway.batches.line_caller import LineCaller
from headwater.gateway.batches.open_batches import OpenBatch, OpenBatches
from headwater.gateway.batches.ranges import LINES, HeldRange, Ranges
from headwater.gateway.batches.results import Results
from headwater.gateway.batches.workers import PAUSE_SECONDS, Workers
from headwater.services.errors import NotFound, Unavailable
from headwater.services.runtime import end


class RangeRunner:
    """Use within `running`."""

    def __init__(self, durable: Durable, caller: LineCaller) -> None:
        self._caller, self._results = caller, Results(durable)
        self._open = OpenBatches(Files(durable), Ledger(durable))
        # One more than are answered at once, so that the last lines of a range do not answer alone.
        seats = -(-caller.concurrency // LINES) + 1
        self._workers = Workers(durable, Ranges(durable).next, self._work, seats)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[RangeRunner]:
        """Takes ranges for the length of a scope; leaving it gives back those that are not done."""
        async with self._open.running(), self._workers.running():
            yield self

    async def _work(self, held: HeldRange) -> None:
        tenant, batch_id = held.range.tenant, held.range.batch_id
        try:
            async with held.held(), self._open.used(tenant, batch_id) as batch:
                await self._answer(held, batch)
            await held.done()
        except asyncio.CancelledError:
            await held.give_back()
            raise
        except NotFound:
            # The batch or its file is gone: nobody waits for the answers.
            await held.done()
        except (*FAILURES, Unavailable) as failure:
            structlog.get_logger().warning("lines of a batch interrupted", batch=batch_id, error=repr(failure))
            await held.give_back(PAUSE_SECONDS)

    async def _answer(self, held: HeldRange, batch: OpenBatch) -> None:
        """Until every line of the range has a result, or the batch ends without them."""
        lines = held.range.read(batch.content)
        work = asyncio.ensure_future(asyncio.gather(*(self._line(batch, number, text) for number, text in lines)))
        try:
            await asyncio.wait((work, batch.ended), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await end(work)

    async def _line(self, batch: OpenBatch, number: int, text: bytes) -> None:
        batch_id = batch.kept.batch.id
        if await insist(lambda: self._results.has(batch_id, number)):
            return
        result = await self._caller.answer(batch.kept.payer, text)
        await insist(lambda: self._results.keep(batch_id, number, result))
