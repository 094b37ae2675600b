"""Answers the next ranges of lines in the queue, of any batch. All gateways do so at the same
time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

import structlog

from headwater.services.runtime.errors import InternalError, NotFound, Unavailable
from headwater.services.runtime.tasks import end
from headwater.services.runtime.unforeseen import unforeseen

from ...buckets import FAILURES
from ..busy import Busy, patience_of, rest_seconds
from ..durable import Durable
from ..retry import retry
from ..workers import MAX_ERRORS, PAUSE_SECONDS, Workers
from .files import Files
from .ledger import Ledger
from .line_caller import LineCaller
from .lines import read_line
from .open_batches import OpenBatch, OpenBatches
from .ranges import LINES, HeldRange, Ranges
from .records import Failure, Kept, Result, new_id
from .results import Results

_FAULT = Failure(
    code=InternalError.code,
    message=f"it failed {MAX_ERRORS} times by an internal fault; the log has it",
)
NumberedLine = tuple[int, bytes]


class RangeRunner:
    """Answers ranges of lines. Use within `running`."""

    def __init__(self, durable: Durable, caller: LineCaller) -> None:
        self._caller = caller
        self._results = Results(durable)
        self._ledger = Ledger(durable)
        self._open = OpenBatches(Files(durable), self._ledger)
        # One more than are answered at once, so that the last lines of a range do not answer alone.
        seats = -(-caller.concurrency // LINES) + 1
        self._workers = Workers(durable, Ranges(durable).next, self._work, self._count_error, seats)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[RangeRunner]:
        """Runs ranges inside this context. At its end, unfinished ranges are given back to the
        queue."""
        async with self._open.running(), self._workers.running():
            yield self

    async def _work(self, held: HeldRange) -> None:
        tenant = held.range.tenant
        batch_id = held.range.batch_id
        try:
            async with held.held(), self._open.used(tenant, batch_id) as batch:
                is_done = await self._answer(held, batch)
            # Lines of other batches must not wait for lines that cannot be served now.
            await (held.done() if is_done else held.give_back(rest_seconds(held.num_deliveries)))
        except asyncio.CancelledError:
            await held.give_back()
            raise
        except NotFound:
            # The batch or its file is gone: the answers are not wanted.
            await held.done()
        except (*FAILURES, Unavailable) as failure:
            structlog.get_logger().warning(
                "lines of a batch interrupted", batch=batch_id, error=repr(failure)
            )
            await held.give_back(PAUSE_SECONDS)

    async def _answer(self, held: HeldRange, batch: OpenBatch) -> bool:
        """Answers lines until every line of the range has a result, or the batch ends. Returns
        False where some lines must wait."""
        lines = held.range.read(batch.content)
        patience = patience_of(held.num_deliveries)
        failed: list[NumberedLine] = []
        each = (self._line(batch, line, patience, failed) for line in lines)
        work = asyncio.ensure_future(asyncio.gather(*each))
        try:
            await asyncio.wait((work, batch.ended), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return True
            num_left = work.result().count(False)
            if failed and await self._give_up(held, failed):
                num_left -= len(failed)
            return num_left == 0
        finally:
            await end(work)

    async def _give_up(self, held: HeldRange, failed: list[NumberedLine]) -> bool:
        """Counts a delivery in which lines failed by unforeseen errors. After the last one that is
        their result."""

        def count(kept: Kept) -> None:
            kept.range_errors[held.range.first] = kept.range_errors.get(held.range.first, 0) + 1

        kept = await retry(
            lambda: self._ledger.change(held.range.tenant, held.range.batch_id, count)
        )
        if kept.range_errors[held.range.first] < MAX_ERRORS:
            return False
        for number, text in failed:
            result = Result(
                id=new_id("batch_req_"), custom_id=read_line(text).custom_id, error=_FAULT
            )
            await retry(functools.partial(self._results.keep, kept.batch.id, number, result))
        return True

    async def _count_error(self, held: HeldRange) -> bool:
        """Counts an error. Errors of single lines are counted elsewhere; others end the range with
        its batch."""
        return False

    async def _line(
        self, batch: OpenBatch, line: NumberedLine, patience: int, failed: list[NumberedLine]
    ) -> bool:
        """Answers one line. Returns True where it has a result; adds it to `failed` after an
        unforeseen error."""
        number, text = line
        try:
            return await self._answer_line(batch.kept, number, text, patience)
        except (*FAILURES, Unavailable):
            raise
        except Exception as fault:
            unforeseen.add(fault, "line failed", batch=batch.kept.batch.id, line=number)
            failed.append(line)
            return False

    async def _answer_line(self, kept: Kept, number: int, text: bytes, patience: int) -> bool:
        batch_id = kept.batch.id
        if await retry(lambda: self._results.has(batch_id, number)):
            return True
        try:
            result = await self._caller.answer(kept.payer, text, patience=patience)
        except Busy:
            return False
        await retry(lambda: self._results.keep(batch_id, number, result))
        return True
