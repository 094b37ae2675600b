"""Workers of a queue of a real JetStream that meet unforeseen errors."""

from __future__ import annotations

import asyncio
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
    try:
        async with Bus.open(server.url) as bus:
            yield Durable(bus)
    finally:
        await server.stop()


async def test_an_unforeseen_error_in_taking_work_is_logged_and_work_is_taken_again(
    durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(workers, "MAX_PAUSE_SECONDS", 0.05)
    ledger = BackgroundLedger(durable)
    errors = [ValueError("unforeseen")] * 12
    done = asyncio.Event()
    response = {"id": "resp_1", "status": "queued"}
    record = Record(
        tenant=Tenant(id="ada"),
        priority=0,
        request_id="r",
        body=b"{}",
        is_streamed=False,
        response=response,
    )
    await ledger.add(record)

    async def take() -> HeldResponse:
        if errors:
            raise errors.pop()
        return await ledger.next()

    async def work(held: HeldResponse) -> None:
        assert held.response_id == "resp_1"
        await held.done()
        done.set()

    async def count_error(held: HeldResponse) -> bool:
        raise AssertionError("no work failed")

    with structlog.testing.capture_logs() as lines:
        # The pauses grow to 0.05 s, not to 20 s.
        async with asyncio.timeout(60), Workers(durable, take, work, count_error, 2).running():
            await done.wait()
    assert [line["event"] for line in lines] == ["work cannot be taken"] * 12
