"""What a run in the background owes to its client and to other runs, over a real JetStream and
Redis."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest

from headwater.gateway.buckets import Overtaken
from headwater.gateway.http.background_responses import _cancel
from headwater.gateway.jobs.background import run as background_run
from headwater.gateway.jobs.background.events import log_of
from headwater.gateway.jobs.background.ledger import BackgroundLedger
from headwater.gateway.jobs.background.records import Record
from headwater.gateway.jobs.background.run import Run, Stopped
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.jobs.response_store import ResponseStore
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import tasks
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.store import Store


def reported(kind: str, **more: Any) -> bytes:
    """An event of a stream."""
    return b"id: 1\nevent: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind} | more),
    )


async def reply(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def _take_over(record: Record) -> None:
    record.owner = "another"


@pytest.mark.parametrize(("meanwhile", "ended_by"), [(_cancel, Stopped), (_take_over, Overtaken)])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_an_answer_that_comes_too_late_changes_nothing(
    meanwhile: Any, ended_by: type[Exception], is_stored: bool, nats_url: str, redis_url: str
) -> None:
    tenant = Tenant(id=uuid.uuid4().hex)
    response_id = f"resp_{uuid.uuid4().hex}"
    response = {"id": response_id, "status": "queued", "created_at": 1, "store": is_stored}
    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store:
        durable = Durable(bus)
        ledger = BackgroundLedger(durable)

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await ledger.change(tenant.id, response_id, meanwhile)
            await reply(
                send,
                200,
                reported("response.completed", response=response | {"status": "completed"}),
            )

        await ledger.add(
            Record(
                tenant=tenant,
                priority=0,
                request_id="r",
                body=b"{}",
                is_streamed=False,
                response=response,
            )
        )
        run = Run(
            TenantStorage(durable, StorageLimits()),
            answer,
            ResponseStore(store, 60.0),
            tenant.id,
            response_id,
        )
        with pytest.raises(ended_by):
            async with asyncio.timeout(60):
                await run.to_its_end()
        left = await ledger.get(tenant.id, response_id)
    assert left.response["status"] == ("cancelled" if meanwhile is _cancel else "in_progress")


AGAIN = ("GET", "/v1/streams/r")
ANEW = ("POST", "/v1/responses")
LOST = reported("error", code="stream_taken_over") + reported(
    "response.failed", response={"status": "failed"}
)


@pytest.mark.parametrize(
    ("owner", "statuses", "asked"),
    [
        ("", [200], [ANEW]),
        ("", [503, 200], [ANEW, ANEW]),
        ("before", [200], [AGAIN]),
        ("before", [503, 200], [AGAIN, AGAIN]),
        ("before", [404, 503, 200], [AGAIN, ANEW, ANEW]),
    ],
)
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_run_goes_on_with_the_stream_of_the_one_before_or_begins_anew(
    owner: str,
    statuses: list[int],
    asked: list[tuple[str, str]],
    is_lost: bool,
    nats_url: str,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that loses the stream to another writes nothing about it to the answer. The end that a
    run writes itself never stops it, however often it looks."""
    monkeypatch.setattr(background_run, "LOOK_SECONDS", 0.0)
    # Of many looks, some lose their cancellation.
    monkeypatch.setattr(tasks, "INSIST_SECONDS", 0.05)
    tenant = Tenant(id=uuid.uuid4().hex)
    response_id = f"resp_{uuid.uuid4().hex}"
    response: dict[str, Any] = {
        "id": response_id,
        "status": "queued",
        "created_at": 1,
        "store": False,
    }
    done = reported("response.completed", response=response | {"status": "completed"})
    received: list[tuple[str, str]] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        status = statuses[len(received)]
        received.append((scope["method"], scope["path"]))
        await reply(send, status, b"{}" if status != 200 else LOST if is_lost else done)

    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store:
        durable = Durable(bus)
        ledger = BackgroundLedger(durable)
        record = Record(
            tenant=tenant,
            priority=0,
            request_id="r",
            body=b"{}",
            is_streamed=True,
            response=response,
        )
        record.owner = owner
        await ledger.add(record)
        run = Run(
            TenantStorage(durable, StorageLimits()),
            answer,
            ResponseStore(store, 60.0),
            tenant.id,
            response_id,
        )
        async with asyncio.timeout(60):
            if is_lost:
                with pytest.raises(Overtaken):
                    await run.to_its_end()
            else:
                await run.to_its_end()
        left = await ledger.get(tenant.id, response_id)
        text = [
            event["type"]
            async for _, data in log_of(durable, tenant.id, response_id).stored()
            for event in msgspec.json.decode(data)
        ]
    assert received == asked
    assert left.response["status"] == ("in_progress" if is_lost else "completed")
    assert text == ([] if is_lost else ["response.completed"])


@pytest.mark.parametrize("is_whole", [False, True])
async def test_events_that_the_tenant_has_no_room_for_are_not_kept(
    is_whole: bool, nats_url: str, redis_url: str
) -> None:
    """An answer that goes on for ever ends; of one that is whole the last event says all."""
    tenant = Tenant(id=uuid.uuid4().hex)
    response_id = f"resp_{uuid.uuid4().hex}"
    limit = 300_000
    response: dict[str, Any] = {
        "id": response_id,
        "status": "queued",
        "created_at": 1,
        "store": False,
    }
    piece = reported("response.output_text.delta", output_index=0, delta="x" * 10_000)
    last = reported(
        "response.completed", response=response | {"status": "completed", "output": ["whole"]}
    )

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "DELETE":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        num_left = 100
        while not is_whole or num_left:
            num_left -= 1
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0 if is_whole else 0.001)
        await send({"type": "http.response.body", "body": last})

    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store, asyncio.timeout(60):
        durable = Durable(bus)
        ledger = BackgroundLedger(durable)
        storage = TenantStorage(durable, StorageLimits(limit))
        await ledger.add(
            Record(
                tenant=tenant,
                priority=0,
                request_id="r",
                body=b"{}",
                is_streamed=True,
                response=response,
            )
        )
        await Run(storage, answer, ResponseStore(store, 60.0), tenant.id, response_id).to_its_end()
        left = await ledger.get(tenant.id, response_id)
        text = [
            event
            async for _, data in log_of(durable, tenant.id, response_id).stored()
            for event in msgspec.json.decode(data)
        ]
        assert await storage.of(tenant.id) < limit + 10_000
        await ledger.drop_all(tenant.id)
        assert await storage.of(tenant.id) == 0
    assert left.response["status"] == ("completed" if is_whole else "failed")
    assert left.response.get("output", left.response.get("error", {}).get("code")) == (
        ["whole"] if is_whole else "storage_limit_exceeded"
    )
    assert text[-1] == {
        "type": f"response.{left.response['status']}",
        "response": left.response,
        "sequence_number": len(text) - 1,
    }
