"""Workers of a queue of a real JetStream, when something fails that nobody foresaw."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from headwater.gateway.jobs import workers
from headwater.gateway.jobs.background.ledger import BackgroundLedger, HeldResponse
from headwater.gateway.jobs.background.records import Record
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.jobs.workers import Workers
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.bus import Bus
from headwater.services.stack.embedded import start_nats


@pytest.fixture
async def durable(tmp_path: Path, kept: dict[str, Any]) -> AsyncIterator[Durable]:
    # The queues of the NATS that tests share have other tests' work.
    server = await start_nats(tmp_path, jetstream=tmp_path / "streams", **kept)
    async with Bus.open(server.url, wait_seconds=5.0) as bus:
        yield Durable(bus)
    await server.stop()


async def add_response(ledger: BackgroundLedger, *, is_streamed: bool = False) -> str:
    """Id of a response of ada's that is in the queue."""
    response = {"id": f"resp_{uuid.uuid4().hex}", "status": "queued", "created_at": 1, "store": False}
    record = Record(
        tenant=Tenant(id="ada"), priority=0, request_id="r", body=b"{}", is_streamed=is_streamed, response=response
    )
    await ledger.add(record)
    return record.id


async def test_an_unforeseen_error_in_taking_work_is_logged_and_work_is_taken_again(
    durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(workers, "MAX_PAUSE_SECONDS", 0.05)
    ledger, errors, done = BackgroundLedger(durable), [ValueError("unforeseen")] * 12, asyncio.Event()
    response_id = await add_response(ledger)

    async def take() -> HeldResponse:
        if errors:
            raise errors.pop()
        return await ledger.next()

    async def work(held: HeldResponse) -> None:
        assert held.response_id == response_id
        await held.done()
        done.set()

    with structlog.testing.capture_logs() as lines:
        # The pauses grow to 0.05 s, not to 20 s.
        async with asyncio.timeout(10), Workers(durable, take, work, 2).running():
            await done.wait()
    assert [line["event"] for line in lines] == ["work cannot be taken"] * 12
