"""The batches that a gateway runs at once, over a JetStream server of its own."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.batches.ledger import Ledger
from headwater.gateway.jobs.batches.line_caller import LineCaller
from headwater.gateway.jobs.batches.results import Results
from headwater.gateway.jobs.batches.runner import MAX_BATCHES, Runner
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.jobs.in_process import KNOWN_TENANT
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from tests.gateway.jobs.batches.test_run import Answering, Bench
from tests.gateway.jobs.test_workers import durable

__all__ = ["durable"]


class EndlessFor(Answering):
    """An application that never answers the lines of one tenant."""

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self._tenant = tenant

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope[KNOWN_TENANT].tenant.key == self._tenant:
            await asyncio.Event().wait()
        await super().__call__(scope, receive, send)


async def test_a_tenant_with_many_batches_leaves_room_for_those_of_others(durable: Durable) -> None:
    ada = Bench(durable, Files(durable), Ledger(durable), Results(durable), uuid.uuid4().hex)
    bob = replace(ada, tenant=uuid.uuid4().hex)
    caller = LineCaller(EndlessFor(ada.tenant), concurrency=64, registry=CollectorRegistry())
    for _ in range(2 * MAX_BATCHES):
        await ada.batch(1)
    short = await bob.batch(1)
    async with Runner(
        TenantStorage(durable, StorageLimits()), caller, max_line_bytes=1000
    ).running():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while not (await bob.ledger.get(bob.tenant, short.batch.id)).batch.is_over:  # noqa: ASYNC110 (a client)
                    await asyncio.sleep(0.02)
        assert (await bob.ledger.get(bob.tenant, short.batch.id)).batch.status == "completed"
