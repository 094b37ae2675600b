"""A process that reaches NATS and has no cluster token: what it announces, and what it writes, is
nobody's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import nats
import pytest
from nats.aio.client import Client

from headwater.gateway.tenancy.directory import new_key
from headwater.gateway.tenancy.records import Removed, TenantRecord, new_uid
from headwater.gateway.tenancy.tenant_store import BUCKET, TenantStore, _key, _removed_key
from headwater.proto import engine_pb2_grpc
from headwater.proto.events_pb2 import Member as MemberPb
from headwater.services.runtime import cluster_key, freshness, seal, subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.cluster_key import ClusterKey
from headwater.services.runtime.errors import NotFound
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.refusals import REFUSED
from tests.gateway.processes import (
    Gateway,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.nats_flush import flush

TOKEN = secrets.token_hex(32)
KEY = ClusterKey([TOKEN])
ADMIN = "admin-key-of-the-house"
FIRST = Member(
    kind=Kind.ENGINE,
    replica_id=f"e-{uuid.uuid4().hex[:8]}",
    epoch=new_epoch(),
    address="127.0.0.1:1",
    load=ReplicaLoad(max_running=8),
)


@contextlib.asynccontextmanager
async def opened(url: str, key: ClusterKey | None) -> AsyncIterator[Bus]:
    with cluster_key.using(key):
        async with Bus.open(url) as bus:
            yield bus


def refused(what: str, why: str) -> float:
    return REFUSED.labels(what, why)._value.get()


async def next_of(messages: Subscription) -> bytes:
    async with asyncio.timeout(60):
        return (await anext(messages)).payload


@pytest.fixture
async def stranger(nats_url: str) -> AsyncIterator[Client]:
    """A NATS client without the cluster's token."""
    connection = await nats.connect(nats_url)
    yield connection
    await connection.close()


async def test_the_bus_brings_what_members_say_and_nothing_else(
    nats_url: str, stranger: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = f"t{uuid.uuid4().hex}"
    async with (
        opened(nats_url, KEY) as ours,
        opened(nats_url, KEY) as reader,
        opened(nats_url, ClusterKey(["x" * 32])) as other_cluster,
        opened(nats_url, None) as tokenless,
        reader.subscribe(f"{word}.>") as received,
        tokenless.subscribe(f"{word}.>") as received_without,
    ):
        caught: asyncio.Queue[bytes] = asyncio.Queue()
        await stranger.subscribe(f"{word}.>", cb=_noting(caught))
        await flush(stranger)
        before = {
            why: refused("message", why)
            for why in ("unsigned", "forged", "replayed", "stale", "no_token_here")
        }
        await ours.publish(f"{word}.a", b"1")
        assert await next_of(received) == b"1"
        # NATS keeps the order of one sender only: the next sender waits until the stranger has
        # caught this message.
        async with asyncio.timeout(60):
            sealed = await caught.get()
        await stranger.publish(f"{word}.a", b"unsigned")
        await other_cluster.publish(f"{word}.a", b"forged")
        # What was caught is said again, for another subject, and with another payload.
        await stranger.publish(f"{word}.a", sealed)
        await stranger.publish(f"{word}.b", sealed)
        await stranger.publish(f"{word}.a", sealed[:-1] + b"2")
        await stranger.publish(f"{word}.a", sealed[:20])
        await flush(stranger)
        # The other cluster's message may come after this sender's first.
        async with asyncio.timeout(60):
            while refused("message", "forged") < before["forged"] + 3:
                await ours.publish(f"{word}.a", b"3")
                assert await next_of(received) == b"3"
        async with reader.subscribe(f"{word}.>") as newcomer:
            now = freshness.now_ms()
            for module in (freshness, seal):
                monkeypatch.setattr(module, "now_ms", lambda: now + 61_000)
            await stranger.publish(f"{word}.a", sealed)
            await flush(stranger)
            await ours.publish(f"{word}.a", b"4")
            assert await next_of(newcomer) == b"4"
        # This bus has a connection of its own. All earlier messages have arrived there when this
        # one has.
        assert (await next_of(received_without)) == b"unsigned"
        gained = {why: refused("message", why) - count for why, count in before.items()}
        assert gained["replayed"] >= 1
        assert gained["stale"] >= 1
        assert gained["unsigned"] >= 2
        assert gained["no_token_here"] >= 1


def _noting(caught: asyncio.Queue[bytes]) -> Any:
    async def note(message: Any) -> None:
        caught.put_nowait(message.data)

    return note


async def test_an_answer_to_a_question_is_believed_from_a_member_alone(
    nats_url: str, stranger: Client
) -> None:
    word = f"t{uuid.uuid4().hex}"

    async def lie(message: Any) -> None:
        await stranger.publish(message.reply, b"a lie")

    async with opened(nats_url, KEY) as asker, opened(nats_url, KEY) as knower:
        subscription = await stranger.subscribe(word, cb=lie)
        await flush(stranger)
        assert await asker.request(word, b"?", seconds=10) is None
        await subscription.unsubscribe()
        await flush(stranger)
        async with knower.subscribe(word) as questions:
            asked = asyncio.create_task(asker.request(word, b"?", seconds=60))
            question = await anext(questions)
            await knower.publish(question.reply, b"the truth")
            assert await asked == b"the truth"


async def test_a_member_s_heartbeat_counts_under_its_own_subject_only(nats_url: str) -> None:
    async with (
        opened(nats_url, KEY) as ours,
        opened(nats_url, KEY) as reader,
        Members(reader, [Kind.ENGINE]).running() as members,
        asyncio.timeout(60),
    ):
        await ours.publish(subjects.member("engine", "another"), FIRST.to_pb().SerializeToString())
        honest = Member(
            kind=Kind.ENGINE, replica_id=f"{FIRST.replica_id}-2", epoch=3, address="127.0.0.1:2"
        )
        async with Heartbeat.running(ours, lambda: honest):
            await members.wait_for(lambda all: all.get(Kind.ENGINE, honest.replica_id) is not None)
        assert members.get(Kind.ENGINE, FIRST.replica_id) is None


class SilentEngine(engine_pb2_grpc.EngineServicer):
    """Says who it is, takes sessions, and gathers prompts."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.num_calls = 0
        self.frames: list[Any] = []

    async def Info(self, request: Any, context: Any) -> MemberPb:
        self.num_calls += 1
        return MemberPb(
            kind=MemberPb.KIND_ENGINE, incarnation={"replica_id": "forged", "epoch": self.epoch}
        )

    async def Session(self, frames: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls += 1
        async for frame in frames:
            self.frames.append(frame)
        yield


@contextlib.asynccontextmanager
async def silent_engine() -> AsyncIterator[tuple[SilentEngine, str]]:
    server = grpc.aio.server()
    engine = SilentEngine(new_epoch())
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield engine, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_forged_engine_is_sent_nothing_and_a_forged_key_opens_nothing(
    nats_url: str, stranger: Client, text_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    common = (f"--nats-url={nats_url}", f"--cluster-token-file={tmp_path / 'token'}")
    # Of this test alone: the server is shared.
    model = f"m-{uuid.uuid4().hex[:8]}"
    named = f"--served-model-name={model}"
    stages = (
        processor_stage(text_folder, *common, named),
        output_processor_stage(text_folder, *common, named),
        engine_stage(*common, named),
        gateway_stage(*common, f"--admin-key={ADMIN}"),
    )
    with started(*stages), Gateway(stages[-1]) as gateway:
        await asyncio.to_thread(gateway.wait_until, gateway.is_ready)
        admin = {"authorization": f"Bearer {ADMIN}"}
        [replica] = [
            each
            for each in gateway.client.get("/admin/replicas", headers=admin).json()["data"]
            if each["model"] == model
        ]
        async with silent_engine() as (forged, address), opened(nats_url, KEY) as insider:
            async with Members(insider, [Kind.ENGINE]).running() as members, asyncio.timeout(60):
                await members.wait_for(lambda all: all.get(Kind.ENGINE, replica["id"]) is not None)
                real = members.get(Kind.ENGINE, replica["id"])
            assert real is not None
            lie = Member(
                kind=Kind.ENGINE,
                replica_id="forged",
                epoch=forged.epoch,
                address=address,
                model=real.model,
                numerics_id=real.numerics_id,
                load=ReplicaLoad(max_running=256, num_total_blocks=1 << 20, prefill_tps=1e9),
            )
            for _ in range(3):
                await stranger.publish(
                    subjects.member("engine", "forged"), lie.to_pb().SerializeToString()
                )
                await flush(stranger)

            def chat(i: int) -> int:
                body = {"model": model, "prompt": f"secret {i}", "max_tokens": 4}
                return gateway.client.post("/v1/completions", json=body, headers=admin).status_code

            assert (
                await asyncio.gather(*(asyncio.to_thread(chat, i) for i in range(8))) == [200] * 8
            )
            assert (forged.num_calls, forged.frames) == (0, [])
        # A digest that the stranger wrote.
        key, secret = new_key()
        record = TenantRecord(id=f"victim-{key.id}", keys=(key,))
        bucket = await stranger.jetstream().key_value(BUCKET)
        await bucket.put(_key(record.id), msgspec.json.encode(record))
        await stranger.publish(subjects.TENANTS_CHANGED, b"")
        async with opened(nats_url, KEY) as insider:
            await insider.publish(subjects.TENANTS_CHANGED, b"")
        # The next tenant is known after the record was read.
        made = gateway.client.post(
            "/admin/tenants", json={"id": f"ada-{key.id}"}, headers=admin
        ).json()
        ada = {"authorization": f"Bearer {made['key']}"}
        await asyncio.to_thread(
            gateway.wait_until,
            lambda: gateway.client.get("/v1/models", headers=ada).status_code == 200,
        )
        hers = {"authorization": f"Bearer {secret}"}
        assert gateway.client.get("/v1/models", headers=hers).status_code == 401
        # Nor does it keep the name.
        assert (
            gateway.client.post("/admin/tenants", json={"id": record.id}, headers=admin).status_code
            == 201
        )
        assert gateway.metric("headwater_refused_total") >= 2
        for name in (record.id, f"ada-{key.id}"):
            await bucket.delete(_key(name))


async def test_an_engine_that_takes_requests_and_says_nothing_loses_them_to_others(
    nats_url: str, text_folder: Path
) -> None:
    """Whoever announced it: here nobody has a token."""
    model = f"m-{uuid.uuid4().hex[:8]}"
    common = (f"--nats-url={nats_url}", f"--served-model-name={model}")
    engine = engine_stage(*common)
    stages = (
        processor_stage(text_folder, *common),
        output_processor_stage(text_folder, *common),
        engine,
        gateway_stage(common[0]),
    )

    def ask(i: int) -> int:
        body = {"model": model, "prompt": f"tell {i}", "max_tokens": 4}
        return gateway.client.post("/v1/completions", json=body).status_code

    with started(*stages), Gateway(stages[-1]) as gateway:
        # The gateway has found the other stages when a request succeeds.
        await asyncio.to_thread(gateway.wait_until, lambda: ask(0) == 200)
        async with silent_engine() as (silent, address), opened(nats_url, None) as bus:
            async with Members(bus, [Kind.ENGINE]).running() as members, asyncio.timeout(60):
                await members.wait_for(
                    lambda all: any(each.address == engine.address for each in all.everyone())
                )
                [real] = [each for each in members.everyone() if each.address == engine.address]
            reported = dataclasses.replace(
                real,
                replica_id="forged",
                epoch=silent.epoch,
                address=address,
                load=ReplicaLoad(max_running=256, num_total_blocks=1 << 20, prefill_tps=1e9),
            )
            async with Heartbeat.running(bus, lambda: reported):
                known = {engine.address, address}
                await asyncio.to_thread(
                    gateway.wait_until,
                    lambda: (
                        known
                        <= {
                            each["address"]
                            for each in gateway.client.get("/admin/replicas").json().get("data", [])
                        }
                    ),
                )
                assert (
                    await asyncio.gather(*(asyncio.to_thread(ask, i) for i in range(8)))
                    == [200] * 8
                )
                assert any(frame.adds for frame in silent.frames), "it was sent something"


async def test_records_from_before_the_token_are_trusted_once_and_signed(
    nats_url: str,
) -> None:
    key, _ = new_key()
    record = TenantRecord(id=f"old-{key.id}", keys=(key,))
    async with opened(nats_url, None) as before:
        await TenantStore(before).add(record)
    async with opened(nats_url, KEY) as bus:
        with cluster_key.using(KEY):
            strict = TenantStore(bus)
            adopting = TenantStore(bus, adopts_unsigned=True)
            after = TenantStore(bus)
        with pytest.raises(NotFound):
            await strict.get(record.id)
        assert record in await adopting.all()
        assert await after.get(record.id) == record
        # A rotated token signs again what the one before it signed.
        with cluster_key.using(ClusterKey(["n" * 32, TOKEN])):
            rotating = TenantStore(bus)
        assert record in await rotating.all()
        with cluster_key.using(ClusterKey(["n" * 32])):
            rotated = TenantStore(bus)
        assert await rotated.get(record.id) == record
        await rotated.remove(record.id)


async def test_an_older_version_that_is_put_back_revokes_no_revocation(nats_url: str) -> None:
    key, _ = new_key()
    record = TenantRecord(id=f"t-{key.id}", keys=(key,))
    async with opened(nats_url, KEY) as bus:
        with cluster_key.using(KEY):
            book = TenantStore(bus)
        await book.add(record)
        bucket = await book._open()
        old = (await bucket.get(_key(record.id))).value or b""
        await book.change(record.id, lambda known: msgspec.structs.replace(known, keys=()))
        assert (await book.get(record.id)).keys == ()
        await bucket.put(_key(record.id), old)
        with pytest.raises(NotFound):
            await book.get(record.id)
        await bucket.delete(_key(record.id))


async def test_a_removal_that_a_stranger_writes_deletes_nothing_of_a_tenant(nats_url: str) -> None:
    victim, gone = (TenantRecord(id=f"t-{uuid.uuid4().hex[:8]}", uid=new_uid()) for _ in range(2))
    async with opened(nats_url, KEY) as bus:
        with cluster_key.using(KEY):
            book = TenantStore(bus)
        for record in (victim, gone):
            await book.add(record)
        forged = Removed(key=victim.key)
        await (await book._open()).put(_removed_key(forged), msgspec.json.encode(forged))
        removed = await book.remove(gone.id)
        reported = {each.key for each in await book.removed()}
        assert (gone.key in reported, victim.key in reported) == (True, False)
        # A rotated token signs again what the one before it signed.
        with cluster_key.using(ClusterKey(["n" * 32, TOKEN])):
            assert removed in await TenantStore(bus).removed()
        with cluster_key.using(ClusterKey(["n" * 32])):
            rotated = TenantStore(bus)
        assert removed in await rotated.removed()
        for each in (removed, forged):
            await rotated.cleared(each)
        await book.remove(victim.id)
        await book.cleared(Removed(key=victim.key))
