"""One runner's work on one batch: check its lines, run those without a result, gather the results into files.

Whatever dies on the way, the next run goes on from the results. A run that was overtaken finds another's name on the
batch and stops; nothing that it wrote is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import IO, Any, TypeVar

from headwater.gateway.batches.durable import FAILURES
from headwater.gateway.batches.files import Files
from headwater.gateway.batches.ledger import Job, Ledger
from headwater.gateway.batches.line_caller import LineCaller
from headwater.gateway.batches.lines import check_lines, numbered
from headwater.gateway.batches.outcome import Outcome, gathered
from headwater.gateway.batches.records import Batch, Counts, Fault, Faults, Kept
from headwater.services.errors import NotFound, Unavailable

PROGRESS_SECONDS = 0.5
"""Between two looks at whether the batch is to be cancelled; clients see how far it is as often."""
PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""What storage gets to come back before a run is given up."""
ReplyT = TypeVar("ReplyT")


class NotMine(Exception):
    """Another run has the batch now."""


class Run:
    def __init__(self, files: Files, ledger: Ledger, caller: LineCaller, job: Job, *, max_line_bytes: int) -> None:
        self._files, self._ledger, self._caller, self._job = files, ledger, caller, job
        self._max_line_bytes = max_line_bytes
        self._name = secrets.token_hex(8)
        self._counts = Counts()

    async def to_its_end(self) -> Batch:
        """The batch when it is over. Raises `NotMine`, `NotFound`, and what storage raises."""
        kept = await _insist(lambda: self._ledger.change(self._job.tenant, self._job.batch_id, self._claim))
        if not kept.batch.is_over:
            try:
                async with self._files.opened(kept.tenant, kept.batch.input_file_id) as content:
                    kept = await self._carry(kept, content)
            except NotFound as missing:
                kept = await self._fail(Fault(code="invalid_input_file", message=missing.message))
        await self._ledger.drop_results(kept.batch.id)
        return kept.batch

    async def _carry(self, kept: Kept, content: IO[bytes]) -> Kept:
        kept = await self._validate(kept, content)
        if kept.batch.is_over:
            return kept
        if kept.batch.cancelling_at is None:
            await self._run_lines(kept, content)
        return await self._finish(kept, content)

    def _claim(self, kept: Kept) -> None:
        kept.owner = self._name

    async def _validate(self, kept: Kept, content: IO[bytes]) -> Kept:
        """Refuses the file whole if a line of it could not be told from another, or is none."""
        if kept.batch.in_progress_at is not None:
            return kept
        total, faults = await asyncio.to_thread(check_lines, content, kept.batch.endpoint, self._max_line_bytes)
        if faults:
            return await self._fail(*faults)

        def begin(batch: Batch) -> None:
            batch.request_counts.total = total
            if batch.status == "validating":
                batch.become("in_progress")

        return await self._change(begin)

    async def _fail(self, *faults: Fault) -> Kept:
        def fail(batch: Batch) -> None:
            batch.errors = Faults(data=list(faults))
            batch.become("failed")

        return await self._change(fail)

    async def _run_lines(self, kept: Kept, content: IO[bytes]) -> None:
        """Until every line has a result, the batch is cancelled or another's, or its time is over."""
        done: set[int] = set()
        async for number, _, is_success in self._ledger.results(kept.batch.id):
            done.add(number)
            self._count(is_success)
        todo = ((number, text) for number, text in numbered(content) if number not in done)
        lanes = [self._lane(kept, todo) for _ in range(self._caller.concurrency)]
        work, watch = asyncio.create_task(_side_by_side(lanes)), asyncio.create_task(self._until_cancelled())
        try:
            left = max(0.0, kept.batch.expires_at - time.time())
            await asyncio.wait((work, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _lane(self, kept: Kept, todo: Iterator[tuple[int, bytes]]) -> None:
        for number, text in todo:
            result = await self._caller.answer(kept.payer, text)
            if await _insist(partial(self._ledger.keep_result, kept.batch.id, number, result)):
                self._count(result.is_success)

    async def _until_cancelled(self) -> None:
        """Says how far it is and looks whether it may go on."""
        told = -1
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            count = self._counts.completed + self._counts.failed
            with contextlib.suppress(*FAILURES, Unavailable):
                if count != told:
                    kept = await self._change(self._tell)
                    told = count
                else:
                    kept = await self._ledger.get(self._job.tenant, self._job.batch_id)
                if kept.batch.status == "cancelling" or kept.owner != self._name:
                    return

    async def _finish(self, kept: Kept, content: IO[bytes]) -> Kept:
        """Only a run that still has the batch says where its files are."""

        def finalize(batch: Batch) -> None:
            self._tell(batch)
            if batch.status != "cancelling":
                batch.become("finalizing")

        kept = await self._change(finalize)
        is_cancelled = kept.batch.cancelling_at is not None
        outcome = await gathered(self._files, self._ledger, kept, content, is_cancelled=is_cancelled)

        def end(batch: Batch) -> None:
            outcome.tell(batch)
            batch.become("cancelled" if is_cancelled else "completed" if outcome.is_whole else "expired")

        try:
            return await self._change(end)
        except NotMine:
            # Only then is it certain that nobody was told of them.
            await self._discard(kept, outcome)
            raise

    async def _discard(self, kept: Kept, outcome: Outcome) -> None:
        for file_id in (outcome.output_file_id, outcome.error_file_id):
            if file_id is not None:
                with contextlib.suppress(*FAILURES, Unavailable, NotFound):
                    await self._files.delete(kept.tenant, file_id)

    def _count(self, is_success: bool) -> None:
        if is_success:
            self._counts.completed += 1
        else:
            self._counts.failed += 1

    def _tell(self, batch: Batch) -> None:
        batch.request_counts.completed, batch.request_counts.failed = self._counts.completed, self._counts.failed

    async def _change(self, change: Callable[[Batch], None]) -> Kept:
        def guarded(kept: Kept) -> None:
            if kept.owner != self._name:
                raise NotMine
            change(kept.batch)

        return await _insist(lambda: self._ledger.change(self._job.tenant, self._job.batch_id, guarded))


async def _insist(call: Callable[[], Awaitable[ReplyT]]) -> ReplyT:
    """Storage may be restarting: what it says the last time counts."""
    for pause in PAUSES:
        try:
            return await call()
        except (*FAILURES, Unavailable):
            await asyncio.sleep(pause)
    return await call()


async def _side_by_side(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """The first that fails ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
