"""A durable store that one tenant has filled: administrators and other tenants go on, and what
fills it can go."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats.js.errors
import pytest
from nats.js import JetStreamContext

from headwater.gateway.adapters.catalogue import AdapterCatalogue
from headwater.gateway.adapters.contents import AdapterContents
from headwater.gateway.admin.tenants import make_audit_stream
from headwater.gateway.jobs.background.ledger import BackgroundLedger
from headwater.gateway.jobs.background.records import Record
from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.durable import (
    BACKGROUND,
    BATCHES,
    FILES,
    LINES_QUEUE,
    RESULTS,
    RUNNERS,
    Durable,
)
from headwater.gateway.jobs.storage_bounds import PERCENT, StorageBounds, set_bounds
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.records import new_uid
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import LimitExceeded
from headwater.services.runtime.usage_log import AUDIT_STREAM, STREAM, UsageLog
from headwater.services.stack.embedded import start_nats
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body
from tests.gateway.tenancy.test_line_of_tenants import ADMIN, CHAT, Customer, admin

STORAGE = 60_000_000
FILLED_BY_TENANTS = {
    f"KV_{RESULTS}": f"$KV.{RESULTS}.batch_full",
    f"KV_{BACKGROUND}": f"$KV.{BACKGROUND}.full",
    f"KV_{FILES}": f"$KV.{FILES}.full",
    f"KV_{BATCHES}": f"$KV.{BATCHES}.full",
    "headwater_background_events": f"{subjects.BACKGROUND_EVENTS}.full",
    LINES_QUEUE: f"{subjects.BATCH_LINES}.full",
}


@pytest.fixture
def storage() -> int:
    """Bytes that the JetStream of `small_nats` takes."""
    return STORAGE


@pytest.fixture
def small_nats(storage: int, free_dir: Path, kept: dict[str, Any]) -> Iterator[str]:
    """A server with a small JetStream."""
    config = free_dir / "nats.conf"
    config.write_text(
        f'jetstream {{ store_dir: "{free_dir / "js"}", max_file_store: {storage} }}\n'
    )
    with asyncio.Runner() as runner:
        server = runner.run(start_nats(free_dir, config=config, **kept))
        yield server.url
        runner.run(server.stop())


@pytest.fixture
def stages_behind(request: pytest.FixtureRequest) -> Behind:
    """Stages behind the gateway of `small`. A test may name another fixture than `behind` for
    them."""
    found: Behind = request.getfixturevalue(getattr(request, "param", "behind"))
    return found


@pytest.fixture
def small(
    stages_behind: Behind,
    start_gateway: GatewayStarter,
    small_nats: str,
    shared_redis_url: str,
    tmp_path: Path,
) -> Iterator[Gateway]:
    path = tmp_path / "admins"
    path.write_text(f"carol {ADMIN}\n")
    flags = (
        f"--nats-url={small_nats}",
        f"--redis-url={shared_redis_url}",
        f"--admin-key-file={path}",
    )
    with start_gateway(stages_behind, *flags) as gateway:
        asyncio.run(until_bounded(small_nats))
        yield gateway


async def until_bounded(url: str) -> None:
    async with Bus.open(url) as bus, asyncio.timeout(60):
        js = bus.jetstream()
        assert js is not None
        while await bound_of(js, STREAM) <= 0:  # noqa: ASYNC110 (NATS sends no event)
            await asyncio.sleep(0.05)


async def bound_of(js: JetStreamContext, stream: str) -> int:
    """0 or less for none."""
    try:
        return (await js.stream_info(stream)).config.max_bytes or 0
    except nats.js.errors.NotFoundError:
        return 0


def upload(ada: Customer, num_bytes: int) -> httpx.Response:
    files = {"file": ("full.jsonl", io.BytesIO(bytes(num_bytes)))}
    return ada.gateway.client.post(
        "/v1/files", headers=ada.headers, files=files, data={"purpose": "batch"}
    )


def fill(ada: Customer, url: str) -> None:
    """By the API as far as that goes; what a tenant's batches and responses can fill besides, to
    the last byte."""
    size = 4 * 1024 * 1024
    while size:
        reply = upload(ada, size)
        if reply.status_code != 200:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_full"), (
                reply.text
            )
            size //= 8
    assert asyncio.run(fill_streams(url)) == set(FILLED_BY_TENANTS)


async def fill_streams(url: str) -> set[str]:
    """Streams that took no more."""
    full = set()
    async with Bus.open(url) as bus:
        js = bus.jetstream()
        assert js is not None
        # As if each gateway held all the lines that it takes at once: what waits behind them fills
        # the queue.
        paused = await js.pause_consumer(LINES_QUEUE, RUNNERS, pause_until="2100-01-01T00:00:00Z")
        assert paused.paused
        for stream, subject in FILLED_BY_TENANTS.items():
            size = 512 * 1024
            number = 0
            while size:
                try:
                    await js.publish(f"{subject}.{(number := number + 1)}", bytes(size))
                except nats.js.errors.APIError:
                    full.add(stream)
                    size //= 8
    return full


def test_a_tenant_that_has_filled_its_storage_stops_no_other(
    small: Gateway, small_nats: str
) -> None:
    eve = Customer(small)
    ada = Customer(small)
    bob = Customer(small)
    small_file = upload(ada, 1000).json()["id"]
    mine = {"role": "user", "content": "x", "type": "message"}
    conversation = ada.post("/v1/conversations", {"items": [mine]}).json()["id"]
    fill(eve, small_nats)
    assert upload(ada, 100_000).json()["error"]["code"] == "storage_full"
    # Others are answered, are given keys, and lose them.
    assert bob.post(CHAT, chat_body()).status_code == 200
    made = admin(small, "POST", f"/tenants/{bob.id}/keys", {})
    assert made.status_code == 201, made.text
    revoked = admin(small, "DELETE", f"/tenants/{bob.id}/keys/{bob.key.split('-')[1]}")
    assert revoked.status_code == 200, revoked.text
    small.wait_until(lambda: bob.get("/v1/models").status_code == 401)
    assert Customer(small).post(CHAT, chat_body()).status_code == 200
    # What is there can be deleted, where there is no room to say so.
    for path in (f"/v1/files/{small_file}", f"/v1/conversations/{conversation}"):
        assert small.client.delete(path, headers=ada.headers).json()["deleted"] is True
        assert ada.get(path).status_code == 404
    theirs = eve.get("/v1/files").json()["data"]
    assert (
        small.client.delete(f"/v1/files/{theirs[-1]['id']}", headers=eve.headers).json()["deleted"]
        is True
    )
    removed = admin(small, "DELETE", f"/tenants/{eve.id}")
    assert (removed.status_code, removed.json()["is_cleared"]) == (200, True), removed.text
    small.wait_until(lambda: eve.get("/v1/models").status_code == 401)
    assert ada.post(CHAT, chat_body()).status_code == 200
    records = admin(small, "GET", "/audit").json()["data"]
    assert [each["action"] for each in records][-1] == "remove"


@pytest.mark.long
def test_room_that_a_removed_tenant_had_is_there_again(small: Gateway, small_nats: str) -> None:
    eve = Customer(small)
    ada = Customer(small)
    while upload(eve, 2_000_000).status_code == 200:
        pass
    assert upload(ada, 2_000_000).status_code == 503
    admin(small, "DELETE", f"/tenants/{eve.id}")
    for _ in range(5):
        assert upload(ada, 2_000_000).status_code == 200


def test_a_key_is_revoked_also_where_the_audit_record_cannot_be_written(
    small: Gateway, small_nats: str
) -> None:
    ada = Customer(small)
    bob = Customer(small)

    async def close_the_record() -> None:
        async with Bus.open(small_nats) as bus:
            js = bus.jetstream()
            assert js is not None
            config = (await js.stream_info(AUDIT_STREAM)).config
            config.sealed = True
            await js.update_stream(config)

    asyncio.run(close_the_record())
    assert admin(small, "PATCH", f"/tenants/{ada.id}", {"weight": 2}).status_code == 503
    assert (
        admin(small, "DELETE", f"/tenants/{ada.id}/keys/{ada.key.split('-')[1]}").status_code == 200
    )
    assert admin(small, "DELETE", f"/tenants/{bob.id}").status_code == 200
    for gone in (ada, bob):
        small.wait_until(lambda gone=gone: gone.get("/v1/models").status_code == 401)  # type: ignore[misc]


async def test_bounds_leave_reserved_room_whatever_the_server_has(small_nats: str) -> None:
    assert sum(PERCENT.values()) == 100
    async with Bus.open(small_nats) as bus:
        js = bus.jetstream()
        assert js is not None

        async def make() -> None:
            await Durable(bus).rooms()
            await TenantStore(bus).make()
            await make_audit_stream(bus)
            await UsageLog(bus).make()
            await AdapterCatalogue(bus).make()
            await AdapterContents(bus).make()

        async with StorageBounds(bus, 16 * 1024**3, make).running():
            await until_bounded(small_nats)
        taken = await set_bounds(js, 16 * 1024**3)
        assert STORAGE * 3 // 4 <= taken <= STORAGE
        assert await set_bounds(js, STORAGE) == STORAGE
        for stream, percent in PERCENT.items():
            assert await bound_of(js, stream) == STORAGE * percent // 100
        # Of what was without bounds before nothing is lost.
        files = Files(Durable(bus))
        file = await files.add("ada", "kept", "batch", io.BytesIO(b"kept"), 4)
        await set_bounds(js, STORAGE // 2)
        async with files.opened("ada", file.id) as content:
            assert content.read() == b"kept"


# Bytes of one tenant.


def test_a_tenant_keeps_no_more_than_it_may(small: Gateway) -> None:
    ada = Customer(small, file_bytes=100_000, response_bytes=20_000)
    bob = Customer(small)
    first = upload(ada, 90_000).json()["id"]
    refused = upload(ada, 20_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "storage_limit_exceeded")
    assert "file_bytes: the tenant keeps 9" in refused.json()["error"]["message"]
    assert upload(bob, 20_000).status_code == 200
    asked = {"model": MODEL, "input": "x" * 12_000, "max_output_tokens": 1, "background": True}
    assert ada.post("/v1/responses", asked).json()["error"]["code"] == "storage_limit_exceeded"
    assert small.client.delete(f"/v1/files/{first}", headers=ada.headers).status_code == 200
    assert upload(ada, 20_000).status_code == 200
    sent = {"items": [{"type": "message", "role": "user", "content": "y" * 9_000}]}
    conversations = [ada.post("/v1/conversations", sent) for _ in range(3)]
    assert [reply.status_code for reply in conversations] == [200, 200, 429]
    assert "response_bytes: the tenant keeps" in conversations[2].json()["error"]["message"]
    here = f"/v1/conversations/{conversations[0].json()['id']}"
    assert ada.post(f"{here}/items", sent).status_code == 429
    unkept = ada.post(
        "/v1/responses", {"model": MODEL, "input": "z" * 4000, "max_output_tokens": 1}
    ).json()
    assert unkept["store"] is False
    assert small.client.delete(here, headers=ada.headers).status_code == 200
    kept = ada.post(
        "/v1/responses", {"model": MODEL, "input": "z" * 4000, "max_output_tokens": 1}
    ).json()
    assert (kept["store"], ada.get(f"/v1/responses/{kept['id']}").status_code) == (True, 200)


async def test_a_tenant_has_so_many_responses_in_the_background_and_no_more(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.gateway.jobs.tenant_storage.MAX_BACKGROUND", 2)
    ada, bob = (Tenant(id="x", uid=new_uid()) for _ in range(2))
    async with Bus.open(nats_url) as bus:
        storage = TenantStorage(Durable(bus), StorageLimits())
        ledger = BackgroundLedger(storage.durable)

        async def add(tenant: Tenant) -> str:
            response = {"id": f"resp_{uuid.uuid4().hex}", "status": "queued"}
            async with storage.room_in_background(tenant.key, 2, num_event_bytes=0):
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
            return response["id"]

        first, _ = await add(ada), await add(ada)
        with pytest.raises(LimitExceeded, match="2 responses in the background"):
            await add(ada)
        await add(bob)
        await ledger.drop(ada.key, first)
        await add(ada)
        for tenant in (ada, bob):
            await ledger.drop_all(tenant.key)
            assert await storage.of(tenant.key) == 0


def test_limits_in_bytes_are_changed_and_shown(small: Gateway) -> None:
    ada = Customer(small, file_bytes=1)
    assert upload(ada, 1000).status_code == 429
    changed = admin(
        small, "PATCH", f"/tenants/{ada.id}", {"file_bytes": None, "response_bytes": 5}
    ).json()
    assert (changed["file_bytes"], changed["response_bytes"]) == (None, 5)
    small.wait_until(lambda: upload(ada, 1000).status_code == 200)
    refused = admin(small, "PATCH", f"/tenants/{ada.id}", {"file_bytes": -1}).json()["error"]
    assert (refused["param"], "allowed: a whole number" in refused["message"]) == (
        "file_bytes",
        True,
    )
    assert admin(small, "GET", f"/tenants/{ada.id}").json()["uid"].startswith("t~")
