"""Computes background responses through the gateway's own REST surface, as if their clients read a
stream.

When a process dies meanwhile, the next run goes on with that stream, or begins anew with the same
seed where it is no longer kept. A run that was overtaken loses its stream, or finds another's name
on the record, and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import structlog
from starlette.types import ASGIApp

from headwater.services.runtime.errors import (
    NotFound,
    Unavailable,
)

from ...buckets import FAILURES, Overtaken
from ..busy import Busy, patience_of, rest_seconds
from ..response_store import ResponseStore
from ..tenant_storage import TenantStorage
from ..workers import PAUSE_SECONDS, Workers
from .ledger import BackgroundLedger, HeldResponse
from .run import Run, Stopped

MAX_RESPONSES = 64
"""Number of responses that one gateway computes at once."""
MAX_RESPONSES_OF_TENANT = 48
"""Most of these that belong to one tenant, so that others find seats."""


class BackgroundRunner:
    """Computes background responses of any tenant. Use within `running`."""

    def __init__(self, storage: TenantStorage, app: ASGIApp, responses: ResponseStore) -> None:
        self._storage = storage
        self._app = app
        self._responses = responses
        self._ledger = BackgroundLedger(storage.durable)
        self._workers = Workers(
            storage.durable, self._ledger.next, self._work, self._count_error, MAX_RESPONSES
        )
        self._num_running: Counter[str] = Counter()
        """Number of responses that are computed, by tenant."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BackgroundRunner]:
        """Runs responses inside this context. At its end, unfinished responses are given back to
        the queue."""
        async with self._workers.running():
            yield self

    async def _work(self, held: HeldResponse) -> None:
        if self._num_running[held.tenant] >= MAX_RESPONSES_OF_TENANT:
            await held.give_back(rest_seconds(held.num_deliveries))
            return
        self._num_running[held.tenant] += 1
        try:
            await self._compute(held)
        finally:
            self._num_running -= Counter({held.tenant: 1})

    async def _compute(self, held: HeldResponse) -> None:
        patience = patience_of(held.num_deliveries)
        run = Run(
            self._storage,
            self._app,
            self._responses,
            held.tenant,
            held.response_id,
            patience=patience,
        )
        try:
            async with held.held():
                await run.to_its_end()
            await held.done()
            await run.forget()
        except asyncio.CancelledError:
            await held.give_back()
            raise
        except (NotFound, Stopped):
            # The response was deleted or cancelled, or completed by a run that died before it
            # reported so.
            with contextlib.suppress(*FAILURES):
                await held.done()
            await run.forget()
        except Busy:
            await held.give_back(rest_seconds(held.num_deliveries))
        except Overtaken:
            structlog.get_logger().info("response is another runner's", response=held.response_id)
        except (*FAILURES, Unavailable) as failure:
            structlog.get_logger().warning(
                "response interrupted", response=held.response_id, error=repr(failure)
            )
            await held.give_back(PAUSE_SECONDS)

    async def _count_error(self, held: HeldResponse) -> bool:
        run = Run(self._storage, self._app, self._responses, held.tenant, held.response_id)
        is_over = await run.count_error()
        if is_over:
            await run.forget()
        return is_over
