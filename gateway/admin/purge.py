"""Deletes what removed tenants leave behind: files, batches, responses, conversations,
adapters. Usage records stay.

The gateway that removes a tenant does so at once. Every gateway looks again later, so that nothing
stays where that one died, storage was away, or a request that was still running wrote something.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog

from headwater.services.runtime.errors import HeadwaterError, NotFound
from headwater.services.runtime.store import STORE_FAILURES
from headwater.services.runtime.tasks import owned_task

from ..buckets import FAILURES
from ..jobs.background.ledger import BackgroundLedger
from ..jobs.batches.files import Files
from ..jobs.batches.ledger import Ledger
from ..jobs.batches.ranges import Ranges
from ..jobs.batches.results import Results
from ..jobs.durable import Durable
from ..jobs.response_store import ResponseStore
from ..tenancy.records import Removed
from ..tenancy.tenant_store import TenantStore

LOOK_SECONDS = 60.0
SETTLED_SECONDS = 60.0
"""Seconds after a removal within which every gateway has ended the tenant's requests."""


class Purge:
    """Use within `running`."""

    def __init__(
        self,
        tenant_store: TenantStore,
        durable: Durable,
        responses: ResponseStore,
        drop_adapters: Callable[[str], Awaitable[None]],
    ) -> None:
        self._tenant_store = tenant_store
        self._responses = responses
        self._drop_adapters = drop_adapters
        self._files = Files(durable)
        self._batches = Ledger(durable)
        self._background = BackgroundLedger(durable)
        self._ranges = Ranges(durable)
        self._results = Results(durable)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Purge]:
        async with owned_task(self._look()):
            yield self

    async def clear(self, removed: Removed) -> bool:
        """Deletes what a tenant has left. False: something could not be deleted, and is tried again
        later."""
        try:
            await self._clear(removed.key)
            if time.time() - removed.at >= SETTLED_SECONDS:
                await self._tenant_store.cleared(removed)
        except (*FAILURES, *STORE_FAILURES, HeadwaterError, msgspec.MsgspecError) as failure:
            structlog.get_logger().warning(
                "a removed tenant left something", key=removed.key, error=repr(failure)
            )
            return False
        return True

    async def _clear(self, key: str) -> None:
        for batch in await self._batches.batches(key):
            await self._ranges.drop(batch.id)
            await self._results.drop(batch.id)
            with contextlib.suppress(NotFound):
                await self._batches.drop(key, batch.id)
            # The result of a line that was in progress may have been stored meanwhile.
            await self._results.drop(batch.id)
        await self._files.drop_all(key)
        await self._background.drop_all(key)
        await self._responses.drop_all(key)
        await self._drop_adapters(key)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(HeadwaterError, msgspec.MsgspecError):
                for removed in await self._tenant_store.removed():
                    if not removed.is_cleared:
                        await self.clear(removed)
