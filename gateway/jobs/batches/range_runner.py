"""Answers the next ranges of lines in the queue, of any batch. All gateways do so at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from headwater.services.runtime.errors import NotFound, Unavailable
from headwater.services.runtime.tasks import end

from ...buckets import FAILURES
from ..busy import Busy, patience_of, rest_seconds
from ..durable import Durable
from ..retry import retry
from ..workers import PAUSE_SECONDS, Workers
from .files import Files
from .ledger import Ledger
from .line_caller import LineCaller
from .open_batches import OpenBatch, OpenBatches
from .ranges import LINES, HeldRange, Ranges
from .results import Results


class RangeRunner:
    """Answers ranges of lines. Use within `running`."""

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
                is_done = await self._answer(held, batch)
            # Lines of other batches must not wait behind those that cannot be served now.
            await (held.done() if is_done else held.give_back(rest_seconds(held.num_deliveries)))
        except asyncio.CancelledError:
            await held.give_back()
            raise
        except NotFound:
            # The batch or its file is gone: the answers are not wanted.
            await held.done()
        except (*FAILURES, Unavailable) as failure:
            structlog.get_logger().warning("lines of a batch interrupted", batch=batch_id, error=repr(failure))
            await held.give_back(PAUSE_SECONDS)

    async def _answer(self, held: HeldRange, batch: OpenBatch) -> bool:
        """Answers lines until every line of the range has a result, or the batch ends. Returns False where some lines
        must wait."""
        lines, patience = held.range.read(batch.content), patience_of(held.num_deliveries)
        each = (self._line(batch, number, text, patience) for number, text in lines)
        work = asyncio.ensure_future(asyncio.gather(*each))
        try:
            await asyncio.wait((work, batch.ended), return_when=asyncio.FIRST_COMPLETED)
            return all(work.result()) if work.done() else True
        finally:
            await end(work)

    async def _line(self, batch: OpenBatch, number: int, text: bytes, patience: int) -> bool:
        """Answers one line. Returns True where it has a result."""
        batch_id = batch.kept.batch.id
        if await retry(lambda: self._results.has(batch_id, number)):
            return True
        try:
            result = await self._caller.answer(batch.kept.payer, text, patience=patience)
        except Busy:
            return False
        await retry(lambda: self._results.keep(batch_id, number, result))
        return True
