"""Responses in the background that cannot be served now, or never, over a real JetStream and a
small application."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp

from headwater.gateway.jobs import busy
from headwater.gateway.jobs.background.ledger import BackgroundLedger
from headwater.gateway.jobs.background.records import Record
from headwater.gateway.jobs.background.runner import BackgroundRunner
from headwater.gateway.jobs.durable import BACKGROUND_QUEUE, Durable
from headwater.gateway.jobs.response_store import ResponseStore
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_nats

ANEW = ("POST", "/v1/responses")
FORGOTTEN = ("DELETE", "/v1/streams/r")


class Answering:
    """Answers requests by their tenant: with the error code of `refused`, not before `gate` for
    those of `slow`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refused: dict[str, str] = {}
        self.slow = ""
        self.gate = asyncio.Event()
        self.num_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append((scope["method"], scope["path"]))
        tenant = scope["headwater.known_tenant"].tenant.id
        response = msgspec.json.decode((await receive())["body"] or b"{}")
        if tenant == self.slow and scope["method"] == "POST":
            self.num_open += 1
            await self.gate.wait()
        status = 200
        body = {"type": "response.completed", "response": response | {"status": "completed"}}
        if code := self.refused.get(tenant):
            status = 429
            body = {"error": {"code": code, "message": "it is refused"}}
        data = msgspec.json.encode(body)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send(
            {
                "type": "http.response.body",
                "body": data if status != 200 else b"data: %b\n\n" % data,
            }
        )


class Bench:
    """One gateway that computes responses in the background."""

    def __init__(self, durable: Durable, store: Store) -> None:
        self.durable = durable
        self.app = Answering()
        self.ledger = BackgroundLedger(durable)
        self._storage = TenantStorage(durable, StorageLimits())
        self._responses = ResponseStore(store, 60.0)

    def running(
        self, app: ASGIApp | None = None
    ) -> contextlib.AbstractAsyncContextManager[BackgroundRunner]:
        return BackgroundRunner(self._storage, app or self.app, self._responses).running()

    async def ask(self, tenant: str, *, is_streamed: bool = False) -> str:
        response_id = f"resp_{uuid.uuid4().hex}"
        response = {"id": response_id, "status": "queued", "created_at": 1, "store": False}
        body = msgspec.json.encode(response)
        record = Record(
            tenant=Tenant(id=tenant),
            priority=0,
            request_id="r",
            body=body,
            is_streamed=is_streamed,
            response=response,
        )
        await self.ledger.add(record)
        return response_id

    async def until_idle(self) -> None:
        """Waits until the queue is empty."""
        rooms = await self.durable.rooms()
        async with asyncio.timeout(60):
            while (await rooms.js.stream_info(BACKGROUND_QUEUE)).state.messages:  # noqa: ASYNC110 (NATS sends no event)
                await asyncio.sleep(0.02)

    async def until(
        self, tenant: str, response_id: str, is_so: Callable[[Record], bool]
    ) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not is_so(record := await self.ledger.get(tenant, response_id)):  # noqa: ASYNC110 (a client that polls)
                await asyncio.sleep(0.05)
        return record.response

    async def over(self, tenant: str, response_id: str) -> dict[str, Any]:
        return await self.until(tenant, response_id, lambda record: record.is_over)


@pytest.fixture
async def bench(tmp_path: Path, kept: dict[str, Any], redis_url: str) -> AsyncIterator[Bench]:
    # The queue of the NATS that tests share has other tests' responses.
    server = await start_nats(tmp_path, jetstream=tmp_path / "streams", **kept)
    try:
        async with Bus.open(server.url) as bus, Store.open(redis_url) as store:
            yield Bench(Durable(bus), store)
    finally:
        await server.stop()


@pytest.mark.parametrize("code", ["insufficient_quota", "limit_too_low"])
async def test_a_limit_that_no_waiting_helps_against_ends_the_response(
    bench: Bench, code: str
) -> None:
    bench.app.refused["ada"] = code
    async with bench.running():
        response = await bench.over("ada", await bench.ask("ada"))
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": code, "message": "it is refused"},
    )
    assert bench.app.asked.count(ANEW) == 1


async def test_a_response_that_cannot_be_served_now_is_queued_again_and_served_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The response must rest long enough for the test to read its state.
    monkeypatch.setattr(busy, "FIRST_REST_SECONDS", 3.0)
    bench.app.refused["ada"] = "rate_limit_exceeded"
    async with bench.running():
        response_id = await bench.ask("ada")
        await bench.until(
            "ada", response_id, lambda record: record.response["status"] == "in_progress"
        )
        await bench.until("ada", response_id, lambda record: record.response["status"] == "queued")
        assert bench.app.asked == [ANEW] * 3
        del bench.app.refused["ada"]
        assert (await bench.over("ada", response_id))["status"] == "completed"
    assert [each for each in bench.app.asked if each != FORGOTTEN] == [ANEW] * 4, (
        "the next run looks for no stream"
    )


async def test_responses_that_wait_for_their_tenants_tokens_take_no_seat_from_others(
    bench: Bench,
) -> None:
    bench.app.refused["ada"] = "rate_limit_exceeded"
    for _ in range(70):
        await bench.ask("ada")
    async with bench.running():
        response = await bench.over("bob", await bench.ask("bob"))
    assert response["status"] == "completed"


async def test_one_tenant_gets_three_quarters_of_the_seats_and_others_the_rest(
    bench: Bench,
) -> None:
    bench.app.slow = "ada"
    ids = [await bench.ask("ada") for _ in range(70)]
    async with bench.running():
        response = await bench.over("bob", await bench.ask("bob"))
        assert response["status"] == "completed"
        # These runs began earlier, but each one asks NATS before it calls the application.
        async with asyncio.timeout(60):
            while bench.app.num_open < 48:  # noqa: ASYNC110 (the application has no event)
                await asyncio.sleep(0.02)
        assert bench.app.num_open == 48
        bench.app.gate.set()
        assert {(await bench.over("ada", each))["status"] for each in ids} == {"completed"}
