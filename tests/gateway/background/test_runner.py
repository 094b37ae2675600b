"""What a run in the background owes to its client and to other runs, over a real JetStream and Redis."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest

from headwater.gateway.background.event_log import Overtaken
from headwater.gateway.background.ledger import BackgroundLedger
from headwater.gateway.background.records import Record
from headwater.gateway.background.runner import Stopped, _Run
from headwater.gateway.background.surface import _cancel
from headwater.gateway.batches.durable import Durable
from headwater.gateway.response_store import ResponseStore
from headwater.gateway.tenants import Tenant
from headwater.services.bus import Bus
from headwater.services.store import Store


def _take_over(record: Record) -> None:
    record.owner = "another"


@pytest.mark.parametrize(("meanwhile", "ended_by"), [(_cancel, Stopped), (_take_over, Overtaken)])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_an_answer_that_comes_too_late_changes_nothing(
    meanwhile: Any, ended_by: type[Exception], is_stored: bool, nats_url: str, redis_url: str
) -> None:
    tenant, response_id = Tenant(id=uuid.uuid4().hex), f"resp_{uuid.uuid4().hex}"
    response = {"id": response_id, "status": "queued", "created_at": 1, "store": is_stored}
    async with Bus.open(nats_url, wait_seconds=5.0) as bus, Store.open(redis_url) as store:
        durable = Durable(bus)
        ledger = BackgroundLedger(durable)

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await ledger.change(tenant.id, response_id, meanwhile)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            body = msgspec.json.encode(response | {"status": "completed"})
            await send({"type": "http.response.body", "body": body})

        await ledger.add(
            Record(tenant=tenant, priority=0, request_id="r", body=b"{}", is_streamed=False, response=response)
        )
        run = _Run(durable, answer, ResponseStore(store, 60.0), tenant.id, response_id)
        with pytest.raises(ended_by):
            async with asyncio.timeout(60):
                await run.to_its_end()
        left = await ledger.get(tenant.id, response_id)
    assert left.response["status"] == ("cancelled" if meanwhile is _cancel else "in_progress")
