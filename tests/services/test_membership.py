from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2
from headwater.services import membership
from headwater.services.bus import Bus
from headwater.services.heartbeat import Heartbeat
from headwater.services.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.membership import Change, ChangeKind, Members
from headwater.services.served_model import ServedModel
from headwater.services.stack.embedded import start_nats

ENGINES = (Kind.ENGINE,)


@pytest.fixture
def engine(served_model: ServedModel) -> Member:
    return Member(
        kind=Kind.ENGINE,
        replica_id=f"replica of {served_model.name}",
        epoch=new_epoch(),
        address="127.0.0.1:1",
        model=served_model,
        numerics_id="n",
    )


async def wait_for(members: Members, *expected: Member) -> None:
    async with asyncio.timeout(10):
        await members.wait_for(lambda each: all(each.get(one.kind, one.replica_id) == one for one in expected))


async def wait_until_gone(members: Members, member: Member) -> None:
    async with asyncio.timeout(10):
        await members.wait_for(lambda each: each.get(member.kind, member.replica_id) is None)


def test_a_member_is_the_same_after_the_wire(engine: Member) -> None:
    busy = dataclasses.replace(engine, load=ReplicaLoad(num_running=3, prefill_tps=10.0), draining=True)
    there_and_back = Member.from_pb(events_pb2.Member.FromString(busy.to_pb().SerializeToString()))
    assert there_and_back == busy
    assert there_and_back.load == busy.load


async def test_a_newcomer_knows_everyone_within_milliseconds_of_its_hello(nats_url: str, engine: Member) -> None:
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: engine):
        await asyncio.sleep(0.1)
        started = time.monotonic()
        async with Bus.open(nats_url) as other, Members(other, ENGINES).running() as members:
            await wait_for(members, engine)
        assert time.monotonic() - started < 0.5


async def test_leaving_is_seen_at_once_and_other_kinds_not_at_all(nats_url: str, engine: Member) -> None:
    changes: list[Change] = []
    gateway = dataclasses.replace(engine, kind=Kind.GATEWAY, replica_id="g", model=None)
    async with Bus.open(nats_url) as bus, Members(bus, ENGINES).running() as members:
        members.on_change(lambda change: changes.append(change) if change.member == engine else None)
        async with Heartbeat.running(bus, lambda: gateway), Heartbeat.running(bus, lambda: engine):
            await wait_for(members, engine)
            assert members.get(Kind.GATEWAY, "g") is None
            assert members.of(Kind.ENGINE, engine.model_key) == [engine]
        await wait_until_gone(members, engine)
    assert [change.kind for change in changes] == [ChangeKind.JOINED, ChangeKind.LEFT]


async def test_a_restarted_process_leaves_as_one_incarnation_and_joins_as_another(engine: Member) -> None:
    changes: list[tuple[ChangeKind, int]] = []
    reborn = dataclasses.replace(engine, epoch=new_epoch())
    members = Members(Bus(None), ENGINES)
    members.on_change(lambda change: changes.append((change.kind, change.member.epoch)))
    members.hear(engine, from_bus=True)
    members.hear(reborn, from_bus=True)
    members.hear(engine, from_bus=True)
    members.hear(dataclasses.replace(engine, leaving=True), from_bus=True)
    assert members.of(Kind.ENGINE) == [reborn]
    assert changes == [
        (ChangeKind.JOINED, engine.epoch),
        (ChangeKind.LEFT, engine.epoch),
        (ChangeKind.JOINED, reborn.epoch),
    ]


async def test_silence_on_a_readable_bus_expires_and_a_word_brings_back(
    nats_url: str, engine: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.5)
    async with Bus.open(nats_url) as bus, Members(bus, ENGINES).running() as members:
        members.hear(engine, from_bus=True)
        await wait_until_gone(members, engine)
        members.hear(engine, from_bus=True)
        await wait_for(members, engine)


async def test_an_engine_that_is_silent_on_the_bus_stays_while_it_answers(
    nats_url: str, served: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.2)
    async with Bus.open(nats_url) as bus, Members(bus, ENGINES).running() as members:
        members.hear(served, from_bus=True)
        await asyncio.sleep(2.5)
        assert members.of(Kind.ENGINE) == [served]


class Engine(engine_pb2_grpc.EngineServicer):
    def __init__(self, member: Member) -> None:
        self.member = member

    async def Info(  # type: ignore[override]
        self, request: engine_pb2.InfoRequest, context: object
    ) -> events_pb2.Member:
        return self.member.to_pb()


@pytest.fixture
async def served(engine: Member) -> AsyncIterator[Member]:
    """The engine with a real gRPC server that answers Info and health."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    member = dataclasses.replace(engine, address=f"127.0.0.1:{port}")
    engine_pb2_grpc.add_EngineServicer_to_server(Engine(member), server)  # type: ignore[no-untyped-call]
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    yield member
    await server.stop(None)


async def test_without_a_bus_seeds_are_found_by_asking_and_lost_when_they_fall_silent(engine: Member) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    member = dataclasses.replace(engine, address=f"127.0.0.1:{port}")
    engine_pb2_grpc.add_EngineServicer_to_server(Engine(member), server)  # type: ignore[no-untyped-call]
    await server.start()
    async with Members(Bus(None), ENGINES, {Kind.ENGINE: [member.address]}).running() as members:
        await wait_for(members, member)
        await server.stop(None)
        await wait_until_gone(members, member)


async def test_a_seed_that_is_no_engine_is_named_by_its_address(served: Member) -> None:
    kind = Kind.PROCESSOR
    async with Members(Bus(None), (kind,), {kind: [served.address]}).running() as members:
        await wait_for(members, Member(kind=kind, replica_id=served.address, epoch=0, address=served.address))


async def test_a_seed_and_its_heartbeat_are_one_member(nats_url: str, served: Member) -> None:
    processor = dataclasses.replace(served, kind=Kind.PROCESSOR)
    seeds = {Kind.PROCESSOR: [served.address]}
    async with Bus.open(nats_url) as bus, Members(bus, (Kind.PROCESSOR,), seeds).running() as members:
        async with asyncio.timeout(5):
            await members.wait_for(lambda each: each.get(Kind.PROCESSOR, served.address) is not None)
        async with Heartbeat.running(bus, lambda: processor):
            await wait_for(members, processor)
            assert members.of(Kind.PROCESSOR) == [processor]


async def test_while_the_bus_is_away_whoever_answers_stays_and_whoever_does_not_leaves(
    free_dir: Path, served: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.5)
    dead = dataclasses.replace(served, replica_id="dead", address="127.0.0.1:1")
    nats_server = await start_nats(free_dir)
    async with Bus.open(nats_server.url) as bus, Members(bus, ENGINES).running() as members:
        members.hear(served, from_bus=True)
        members.hear(dead, from_bus=True)
        await nats_server.kill()
        await wait_until_gone(members, dead)
        await asyncio.sleep(1)
        assert members.of(Kind.ENGINE) == [served]
