"""Somebody with NATS's own password keeps a tenant's signed record and puts it back: it opens
nothing again."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import pytest
from nats.js.kv import KeyValue

from headwater.gateway.tenancy.directory import TenantDirectory, new_key
from headwater.gateway.tenancy.last_written import HASH, LastWritten
from headwater.gateway.tenancy.records import Removed, TenantRecord, new_uid
from headwater.gateway.tenancy.tenant_store import BUCKET, TenantStore, _key, _removed_key
from headwater.gateway.tenancy.tenants import AdminKeys
from headwater.services.runtime import cluster_key, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.cluster_key import ClusterKey
from headwater.services.runtime.errors import BadRequest, NotFound, Unauthenticated
from headwater.services.runtime.store import Store
from tests.gateway.processes import Gateway, gateway_stage, started
from tests.long_values import long_but

KEY = ClusterKey([secrets.token_hex(32)])
TOKEN = secrets.token_hex(32)
ADMIN = "admin-key-of-the-house"
NOBODY = AdminKeys({})


class Line:
    """What outlives a gateway, and how to start one."""

    def __init__(self, nats_url: str, redis_url: str, folder: Path) -> None:
        self._flags = (
            f"--nats-url={nats_url}",
            f"--cluster-token-file={folder / 'token'}",
            f"--admin-key={ADMIN}",
        )
        self._redis = f"--redis-url={redis_url}"
        self._folder = folder
        (folder / "token").write_text(TOKEN)

    @contextlib.contextmanager
    def gateway(self, *, remembers: str) -> Iterator[Gateway]:
        """With Redis or with a file, in which gateways before it have written, or with a Redis that
        is empty."""
        flags = (
            (self._redis,)
            if remembers == "redis"
            else (f"--tenants-file={self._folder / 'tenants.json'}",)
        )
        stage = gateway_stage(*self._flags, *flags)
        with started(stage), Gateway(stage) as gateway:
            yield gateway


def admin(gateway: Gateway, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {ADMIN}"}
    return gateway.client.request(method, f"/admin/tenants{path}", json=body, headers=headers)


def status(gateway: Gateway, key: str) -> int:
    return gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


async def settled(gateway: Gateway) -> None:
    """The gateway has read what is in NATS now: it knows a tenant that was made after."""
    name = f"last-{uuid.uuid4().hex[:8]}"
    made = await asyncio.to_thread(admin, gateway, "POST", "", {"id": name})
    await asyncio.to_thread(gateway.wait_until, lambda: status(gateway, made.json()["key"]) == 200)
    await asyncio.to_thread(admin, gateway, "DELETE", f"/{name}")


@contextlib.asynccontextmanager
async def strangers_bucket(nats_url: str) -> AsyncIterator[KeyValue]:
    stranger = await nats.connect(nats_url)
    try:
        yield await stranger.jetstream().key_value(BUCKET)
    finally:
        await stranger.close()


async def purge(bucket: KeyValue, pattern: str) -> None:
    await bucket._js.purge_stream(f"KV_{BUCKET}", subject=f"$KV.{BUCKET}.{pattern}")


@pytest.mark.parametrize("remembers", ["redis", "file"])
@pytest.mark.parametrize("end", long_but(("removed", "revoked"), "revoked"))
async def test_a_record_that_is_put_back_opens_nothing_even_after_a_restart(
    nats_url: str, redis_url: str, tmp_path: Path, end: str, remembers: str
) -> None:
    line = Line(nats_url, redis_url, tmp_path)
    name = f"t-{uuid.uuid4().hex[:8]}"
    with line.gateway(remembers=remembers) as gateway:
        made = (await asyncio.to_thread(admin, gateway, "POST", "", {"id": name})).json()
        await asyncio.to_thread(gateway.wait_until, lambda: status(gateway, made["key"]) == 200)
        async with strangers_bucket(nats_url) as bucket:
            saved = (await bucket.get(_key(name))).value or b""
            path = f"/{name}" if end == "removed" else f"/{name}/keys/{made['keys'][0]['id']}"
            assert (await asyncio.to_thread(admin, gateway, "DELETE", path)).status_code == 200
            # What says that the tenant was removed goes by itself after a while; here it is taken
            # away.
            await purge(bucket, _removed_key(Removed(key=made["uid"])))
            await bucket.put(_key(name), saved)
            await settled(gateway)
            assert status(gateway, made["key"]) == 401
            with line.gateway(remembers=remembers) as restarted:
                await settled(restarted)
                assert status(restarted, made["key"]) == 401
                assert restarted.metric("headwater_refused_total") >= 1
                # The name can be given again, and the one before is still not believed.
                again = (await asyncio.to_thread(admin, restarted, "POST", "", {"id": name})).json()
                await asyncio.to_thread(
                    restarted.wait_until, lambda: status(restarted, again["key"]) == 200
                )
                await bucket.put(_key(name), saved)
                await settled(restarted)
                assert status(restarted, made["key"]) == 401
            await purge(bucket, _key(name))


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    with cluster_key.using(KEY):
        async with Bus.open(nats_url) as bus:
            yield bus


def book(bus: Bus, last_written: LastWritten | None = None) -> TenantStore:
    with cluster_key.using(KEY):
        return TenantStore(bus, last_written or LastWritten())


def last_written(path: Path | None = None, store: Store | None = None) -> LastWritten:
    with cluster_key.using(KEY):
        return LastWritten(str(path) if path else "", store)


def record() -> tuple[TenantRecord, str]:
    key, secret = new_key()
    return TenantRecord(id=f"t-{key.id}", uid=new_uid(), keys=(key,)), f"Bearer {secret}"


def is_let_in(directory: TenantDirectory, authorization: str) -> bool:
    with contextlib.suppress(Unauthenticated):
        directory.identify(authorization, "")
        return True
    return False


async def test_a_gateway_that_did_not_remove_the_tenant_learns_of_it_and_refuses_the_record(
    bus: Bus,
) -> None:
    ada, authorization = record()
    remover = book(bus)
    await remover.add(ada)
    async with TenantDirectory(book(bus), NOBODY).running(bus) as other, asyncio.timeout(60):
        assert other.identify(authorization, "").id == ada.id
        bucket = await remover._open()
        saved = (await bucket.get(_key(ada.id))).value or b""
        # NATS loses the removal before the other gateway reads it.
        removed = await remover.remove(ada.id)
        await purge(bucket, _removed_key(removed))
        await bucket.put(_key(ada.id), saved)
        while is_let_in(other, authorization):  # noqa: ASYNC110 (it is told over NATS)
            await asyncio.sleep(0.01)
        assert await other.read()
        with pytest.raises(Unauthenticated):
            other.identify(authorization, "")
        await purge(bucket, _key(ada.id))


async def test_a_gateway_that_starts_while_the_removal_is_known_to_nats_alone_believes_it(
    bus: Bus,
) -> None:
    ada, authorization = record()
    remover = book(bus)
    await remover.add(ada)
    bucket = await remover._open()
    saved = (await bucket.get(_key(ada.id))).value or b""
    removed = await remover.remove(ada.id)
    await bucket.put(_key(ada.id), saved)
    newcomer = TenantDirectory(book(bus), NOBODY)
    assert await newcomer.read()
    with pytest.raises(Unauthenticated):
        newcomer.identify(authorization, "")
    await remover.cleared(removed)
    await purge(bucket, _key(ada.id))


async def test_a_name_is_given_again_though_the_clock_of_the_one_that_removed_it_is_ahead(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, _ = record()
    remover = book(bus)
    other = book(bus)
    await remover.add(ada)
    monkeypatch.setattr("headwater.gateway.tenancy.tenant_store.now_ms", lambda: 4_000_000_000_000)
    removed = await remover.remove(ada.id)
    await other.add(msgspec.structs.replace(ada, uid=new_uid()))
    assert (await remover.get(ada.id)).uid != ada.uid
    with pytest.raises(BadRequest, match="a name that no tenant has"):
        await remover.add(ada)
    for each in (removed, await other.remove(ada.id)):
        await remover.cleared(each)


async def test_times_that_a_stranger_writes_into_redis_lock_no_tenant_out(
    bus: Bus, redis_url: str
) -> None:
    ada, _ = record()
    async with Store.open(redis_url) as store:
        first = book(bus, last_written(store=store))
        await first.add(ada)
        sealed = await store.command("HGET", HASH, _key(ada.id))
        await store.command(
            "HSET", HASH, _key(ada.id), b"hw1.4000000000000." + b"0" * 64 + b"\n4000000000000"
        )
        second = book(bus, last_written(store=store))
        assert ada in await second.all()
        assert await store.command("HGET", HASH, _key(ada.id)) != sealed
        # A rotated token believes, and writes anew, what the one before it wrote.
        with cluster_key.using(ClusterKey(["n" * 32, KEY._tokens[0].decode()])):
            rotating = LastWritten("", store)
        await rotating.read()
        assert rotating.of(_key(ada.id)) == second._last_written.of(_key(ada.id)) > 0
        await rotating.keep()
        with cluster_key.using(ClusterKey(["n" * 32])):
            rotated = LastWritten("", store)
        await rotated.read()
        assert rotated.of(_key(ada.id)) == rotating.of(_key(ada.id))
        await first.cleared(await first.remove(ada.id))


@pytest.mark.parametrize(
    "written",
    [("HSET", HASH, b"\xff", b"x"), ("SET", HASH, b"x")],
    ids=["a name of no text", "another type"],
)
async def test_whatever_a_stranger_writes_into_redis_tenants_are_read_and_written(
    written: tuple[str | bytes, ...], bus: Bus, redis_url: str
) -> None:
    async with Store.open(redis_url) as store:
        await store.command("DEL", HASH)
        await store.command(*written)
        ada = record()[0]
        bob = record()[0]
        first = book(bus, last_written(store=store))
        await first.add(ada)
        assert ada in await first.all()
        await first.add(bob)
        await first.cleared(await first.remove(bob.id))
        assert ada in await book(bus, last_written(store=store)).all()
        await store.command("DEL", HASH)
        await first.cleared(await first.remove(ada.id))


async def test_records_may_change_while_many_times_are_kept(redis_url: str) -> None:
    async with Store.open(redis_url) as store:
        await store.command("DEL", HASH)
        many = last_written(store=store)
        many.note({f"tenant-{i}": 1 + i for i in range(3000)})
        keeping = asyncio.create_task(many.keep())
        while not keeping.done():
            many.note({f"new-{uuid.uuid4()}": 5})
            await asyncio.sleep(0)
        await keeping
        await many.keep()
        await (other := last_written(store=store)).read()
        assert other._times == many._times
        await store.command("DEL", HASH)


async def test_gateways_of_one_machine_lose_none_of_each_other_s_times(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json.times"
    first = last_written(path)
    second = last_written(path)
    first.note({"a": 1, "b": 5})
    second.note({"a": 3, "c": 2})
    await first.keep()
    await second.keep()
    await (third := last_written(path)).read()
    assert [third.of(key) for key in "abcd"] == [3, 5, 2, 0]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_without_a_token_records_have_no_times_and_none_can_be_made(
    nats_url: str, tmp_path: Path
) -> None:
    ada, _ = record()
    async with Bus.open(nats_url) as bus:
        open_book = TenantStore(bus, LastWritten(str(tmp_path / "times")))
        await open_book.add(ada)
        for payload in (b'{"%b": 4000000000000}' % _key(ada.id).encode(), b"{", b'{"a": "b"}'):
            await bus.publish(subjects.TENANTS_CHANGED, payload)
            open_book.on_changed(payload)
        assert await open_book.get(ada.id) == ada
        await open_book.cleared(await open_book.remove(ada.id))
        with pytest.raises(NotFound):
            await open_book.get(ada.id)
