"""Batches of which this gateway answers lines: keeps a local copy of their files and watches for
their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import IO

from headwater.services.runtime.errors import NotFound, Unavailable
from headwater.services.runtime.tasks import end, start_in

from ...buckets import FAILURES
from .files import Files
from .ledger import Ledger
from .records import Kept

LOOK_SECONDS = 0.5
"""Seconds between two checks whether a batch goes on."""
IDLE_SECONDS = 30.0
"""Seconds for which a file stays open for the next range of its batch."""


class OpenBatch:
    """A batch with an open file. `ended` is set once its lines are not to be answered any more."""

    def __init__(self, kept: Kept, content: IO[bytes], ended: asyncio.Task[None]) -> None:
        self.kept = kept
        self.content = content
        self.ended = ended
        self.num_users = 0
        self.left_at = time.monotonic()


class OpenBatches:
    """The open batches of one gateway. Use within `running`."""

    def __init__(self, files: Files, ledger: Ledger) -> None:
        self._files = files
        self._ledger = ledger
        self._opening: dict[str, asyncio.Future[OpenBatch]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[OpenBatches]:
        try:
            yield self
        finally:
            await end(*self._tasks)

    @contextlib.asynccontextmanager
    async def used(self, tenant: str, batch_id: str) -> AsyncIterator[OpenBatch]:
        """Opens a batch inside the `with` block. Raises `NotFound`, also for a batch whose lines
        are not to be answered any more, `Unavailable` before it has begun, and what storage
        raises."""
        opening = self._opening.get(batch_id)
        if opening is None:
            opening = self._opening[batch_id] = asyncio.get_running_loop().create_future()
            start_in(self._tasks, self._keep(tenant, batch_id, opening))
        batch = await asyncio.shield(opening)
        batch.num_users += 1
        try:
            yield batch
        finally:
            batch.num_users -= 1
            batch.left_at = time.monotonic()

    async def _keep(self, tenant: str, batch_id: str, opening: asyncio.Future[OpenBatch]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            kept = await self._ledger.get(tenant, batch_id)
            if kept.batch.status == "validating":
                # A server of several may know its beginning a moment later.
                raise Unavailable("the batch has not begun", code="storage_unavailable")
            if not kept.is_running:
                raise NotFound("batch", batch_id)
            async with self._files.opened(tenant, kept.batch.input_file_id) as content:
                batch = OpenBatch(kept, content, task)
                opening.set_result(batch)
                while batch.kept.is_running and not _is_idle(batch):
                    await asyncio.sleep(LOOK_SECONDS)
                    with contextlib.suppress(*FAILURES, Unavailable):
                        batch.kept = await self._ledger.get(tenant, batch_id)
        except Exception as failure:
            if not opening.done():
                opening.set_exception(failure)
            elif not isinstance(failure, (*FAILURES, Unavailable, NotFound)):
                raise
        finally:
            opening.cancel()
            del self._opening[batch_id]


def _is_idle(batch: OpenBatch) -> bool:
    return not batch.num_users and time.monotonic() - batch.left_at > IDLE_SECONDS
