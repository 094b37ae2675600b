from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2
from headwater.services.runtime import heartbeat, membership, prober, seeds
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.prober import SERVICES, Prober
from headwater.services.runtime.saved_members import SavedMembers
from headwater.services.runtime.seeds import resolved
from headwater.services.runtime.served_model import ServedModel
from headwater.services.stack.embedded import start_nats

ENGINES = (Kind.ENGINE,)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits 20 s, because a running process may be slow to answer. A missing process
    refuses at once."""
    monkeypatch.setattr(prober, "PROBE_SECONDS", 20.0)


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
    async with asyncio.timeout(60):
        await members.wait_for(
            lambda each: all(each.get(one.kind, one.replica_id) == one for one in expected)
        )


async def wait_until_gone(members: Members, member: Member) -> None:
    async with asyncio.timeout(60):
        await members.wait_for(lambda each: each.get(member.kind, member.replica_id) is None)


def test_a_member_is_the_same_after_the_wire(engine: Member) -> None:
    busy = dataclasses.replace(
        engine, load=ReplicaLoad(num_running=3, prefill_tps=10.0), draining=True
    )
    there_and_back = Member.from_pb(events_pb2.Member.FromString(busy.to_pb().SerializeToString()))
    assert there_and_back == busy
    assert there_and_back.load == busy.load
    idle = Member(kind=Kind.PROCESSOR, replica_id="p", epoch=1, address="a:1", num_running=0)
    for reported in (None, 0, 3):
        described = dataclasses.replace(idle, num_running=reported)
        assert Member.from_pb(described.to_pb()).num_running == reported


async def test_a_newcomer_need_not_wait_for_the_next_heartbeat_of_anyone(
    nats_url: str, engine: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 3600.0)
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: engine):
        for _ in range(2):
            async with Bus.open(nats_url) as other, Members(other, ENGINES).running() as members:
                await wait_for(members, engine)


async def test_leaving_is_seen_at_once_and_other_kinds_not_at_all(
    nats_url: str, engine: Member
) -> None:
    changes: list[Change] = []
    gateway = dataclasses.replace(engine, kind=Kind.GATEWAY, replica_id="g", model=None)
    async with Bus.open(nats_url) as bus, Members(bus, ENGINES).running() as members:
        members.on_change(
            lambda change: changes.append(change) if change.member == engine else None
        )
        async with Heartbeat.running(bus, lambda: gateway), Heartbeat.running(bus, lambda: engine):
            await wait_for(members, engine)
            assert members.get(Kind.GATEWAY, "g") is None
            assert members.of(Kind.ENGINE, engine.model_key) == [engine]
        await wait_until_gone(members, engine)
    assert [change.kind for change in changes] == [ChangeKind.JOINED, ChangeKind.LEFT]


async def test_a_restarted_process_leaves_as_one_incarnation_and_joins_as_another(
    engine: Member,
) -> None:
    changes: list[tuple[ChangeKind, int]] = []
    reborn = dataclasses.replace(engine, epoch=new_epoch())
    members = Members(Bus(None), ENGINES)
    members.on_change(lambda change: changes.append((change.kind, change.member.epoch)))
    members.on_member(engine, from_bus=True)
    members.on_member(reborn, from_bus=True)
    members.on_member(engine, from_bus=True)
    members.on_member(dataclasses.replace(engine, leaving=True), from_bus=True)
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
        members.on_member(engine, from_bus=True)
        await wait_until_gone(members, engine)
        members.on_member(engine, from_bus=True)
        await wait_for(members, engine)


async def test_an_engine_that_is_silent_on_the_bus_stays_while_it_answers(
    nats_url: str, served: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.2)
    asked = Engine.num_asked
    async with (
        Bus.open(nats_url) as bus,
        Members(bus, ENGINES).running() as members,
        asyncio.timeout(60),
    ):
        members.on_member(served, from_bus=True)
        while Engine.num_asked < asked + 3:
            await asyncio.sleep(0.05)
            assert members.of(Kind.ENGINE) == [served]


class Engine(engine_pb2_grpc.EngineServicer):
    num_asked = 0
    """Number of calls to all engines of this class."""

    def __init__(self, member: Member) -> None:
        self.member = member

    async def Info(  # type: ignore[override]
        self, request: engine_pb2.InfoRequest, context: object
    ) -> events_pb2.Member:
        Engine.num_asked += 1
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
    await checks.set(SERVICES[Kind.PROCESSOR], health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    yield member
    await server.stop(None)


async def test_without_a_bus_seeds_are_found_by_asking_and_lost_when_they_fall_silent(
    engine: Member,
) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    member = dataclasses.replace(engine, address=f"127.0.0.1:{port}")
    engine_pb2_grpc.add_EngineServicer_to_server(Engine(member), server)  # type: ignore[no-untyped-call]
    await server.start()
    async with Members(Bus(None), ENGINES, {Kind.ENGINE: [member.address]}).running() as members:
        await wait_for(members, member)
        await server.stop(None)
        await wait_until_gone(members, member)


async def test_an_answer_that_is_not_understood_stops_no_other_question(
    engine: Member, served: Member
) -> None:
    class Stranger(engine_pb2_grpc.EngineServicer):
        async def Info(  # type: ignore[override]
            self, request: engine_pb2.InfoRequest, context: object
        ) -> events_pb2.Member:
            return events_pb2.Member(kind=events_pb2.Member.KIND_UNSPECIFIED)

    strange = grpc.aio.server()
    leaving = grpc.aio.server()
    strange_port = strange.add_insecure_port("127.0.0.1:0")
    port = leaving.add_insecure_port("127.0.0.1:0")
    member = dataclasses.replace(engine, replica_id="leaves", address=f"127.0.0.1:{port}")
    engine_pb2_grpc.add_EngineServicer_to_server(Stranger(), strange)  # type: ignore[no-untyped-call]
    engine_pb2_grpc.add_EngineServicer_to_server(Engine(member), leaving)  # type: ignore[no-untyped-call]
    await strange.start()
    await leaving.start()
    reported = {Kind.ENGINE: [f"127.0.0.1:{strange_port}", served.address, member.address]}
    async with Members(Bus(None), ENGINES, reported).running() as members:
        await wait_for(members, served, member)
        await leaving.stop(None)
        await wait_until_gone(members, member)
        assert members.of(Kind.ENGINE) == [served]
    await strange.stop(None)


async def test_a_listener_that_fails_ends_neither_the_membership_nor_other_listeners(
    nats_url: str, engine: Member
) -> None:
    changes: list[ChangeKind] = []

    def fail(change: Change) -> None:
        raise RuntimeError("a fault in a listener")

    async with Bus.open(nats_url) as bus, Members(bus, ENGINES).running() as members:
        members.on_change(fail)
        members.on_change(
            lambda change: changes.append(change.kind) if change.member == engine else None
        )
        async with Heartbeat.running(bus, lambda: engine):
            await wait_for(members, engine)
        await wait_until_gone(members, engine)
    assert changes == [ChangeKind.JOINED, ChangeKind.LEFT]


async def test_a_seed_that_is_no_engine_is_named_by_its_address(served: Member) -> None:
    kind = Kind.PROCESSOR
    async with Members(Bus(None), (kind,), {kind: [served.address]}).running() as members:
        await wait_for(
            members, Member(kind=kind, replica_id=served.address, epoch=0, address=served.address)
        )


async def test_another_stage_at_a_members_address_is_not_taken_for_it(
    served: Member,
) -> None:
    async with Prober.open() as prober:
        assert await prober.probe(Kind.OUTPUT_PROCESSOR, served.address) is None
        assert await prober.probe(Kind.PROCESSOR, served.address) is not None


async def listening_on_one_port(hosts: list[str]) -> tuple[int, list[grpc.aio.Server]]:
    """A port that is free on the first may be somebody's on another: then the next."""
    options = (("grpc.so_reuseport", 0),)
    for _ in range(20):
        servers = [grpc.aio.server(options=options) for _ in hosts]
        port = 0
        with contextlib.suppress(RuntimeError):
            for host, server in zip(hosts, servers, strict=True):
                port = server.add_insecure_port(f"{host}:{port}")
            return port, servers
    raise AssertionError("no port is free on all of them")


async def test_a_name_stands_for_all_its_addresses_and_a_lost_one_stays_while_it_answers(
    engine: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback has many addresses: three pods of a headless service, on one port."""
    monkeypatch.setattr(seeds, "RESOLVE_SECONDS", 0.05)
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    port, servers = await listening_on_one_port(hosts)
    expected = [
        dataclasses.replace(engine, replica_id=host, address=f"{host}:{port}") for host in hosts
    ]
    for server, member in zip(servers, expected, strict=True):
        engine_pb2_grpc.add_EngineServicer_to_server(Engine(member), server)  # type: ignore[no-untyped-call]
        await server.start()
    found = hosts[:2]

    async def resolve(host: str) -> list[str]:
        assert host == "engines.headwater.svc"
        if not found:
            raise OSError("the resolver is away")
        return found

    reported = {Kind.ENGINE: [f"engines.headwater.svc:{port}"]}
    async with Members(Bus(None), ENGINES, reported, resolve=resolve).running() as members:
        await wait_for(members, *expected[:2])
        found.clear()
        found.append(hosts[2])
        await wait_for(members, *expected)
        found.clear()
        await servers[0].stop(None)
        await wait_until_gone(members, expected[0])
        assert {each.replica_id for each in members.of(Kind.ENGINE)} == set(hosts[1:])
    for server in servers:
        await server.stop(None)


async def test_names_of_this_machine_resolve_to_addresses_of_one_family() -> None:
    assert await resolved("localhost") in (["127.0.0.1"], ["::1"])
    with pytest.raises(OSError, match=r".+"):
        await resolved("no-such-host.invalid")


async def test_a_gateway_that_starts_while_the_bus_is_away_finds_whom_it_last_knew_if_they_live(
    free_dir: Path, served: Member
) -> None:
    kinds = (Kind.ENGINE, Kind.PROCESSOR)
    processor = dataclasses.replace(served, kind=Kind.PROCESSOR, replica_id="p")
    dead = dataclasses.replace(served, replica_id="dead", address="127.0.0.1:1")
    saved = SavedMembers(str(free_dir / "new" / "members.json"))
    assert saved.load() == []
    nats_server = await start_nats(free_dir)
    async with (
        Bus.open(nats_server.url) as bus,
        Members(bus, kinds).running() as members,
        saved.keeping(bus, members),
        Heartbeat.running(bus, lambda: served),
        Heartbeat.running(bus, lambda: processor),
        Heartbeat.running(bus, lambda: dead),
    ):
        await wait_for(members, served, processor, dead)
        async with asyncio.timeout(60):
            while len(saved.load()) < 3:  # noqa: ASYNC110 (a file has no event)
                await asyncio.sleep(0.05)
        await nats_server.kill()
    async with (
        Bus.open(nats_server.url, wait_seconds=0) as bus,
        Members(bus, kinds, saved=saved.load()).running() as members,
        saved.keeping(bus, members),
    ):
        # With the name and the model that an address alone does not show.
        await wait_for(members, served, processor)
        assert len(members.everyone()) == 2
    assert sorted(each.replica_id for each in saved.load()) == sorted(
        [served.replica_id, "p", "dead"]
    )


async def test_a_list_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    for content in ("{", '{"members": [{"kind": "KIND_UNSPECIFIED"}]}', '{"other": 1}'):
        path.write_text(content)
        assert SavedMembers(str(path)).load() == []


async def test_a_seed_and_its_heartbeat_are_one_member(nats_url: str, served: Member) -> None:
    processor = dataclasses.replace(served, kind=Kind.PROCESSOR)
    reported = {Kind.PROCESSOR: [served.address]}
    async with (
        Bus.open(nats_url) as bus,
        Members(bus, (Kind.PROCESSOR,), reported).running() as members,
    ):
        async with asyncio.timeout(60):
            await members.wait_for(
                lambda each: each.get(Kind.PROCESSOR, served.address) is not None
            )
        async with Heartbeat.running(bus, lambda: processor):
            await wait_for(members, processor)
            assert members.of(Kind.PROCESSOR) == [processor]


async def test_while_the_bus_is_away_members_that_answer_stay_and_others_leave(
    free_dir: Path, served: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.5)
    dead = dataclasses.replace(served, replica_id="dead", address="127.0.0.1:1")
    nats_server = await start_nats(free_dir)
    async with Bus.open(nats_server.url) as bus, Members(bus, ENGINES).running() as members:
        members.on_member(served, from_bus=True)
        members.on_member(dead, from_bus=True)
        await nats_server.kill()
        await wait_until_gone(members, dead)
        await asyncio.sleep(1)
        assert members.of(Kind.ENGINE) == [served]


async def test_a_dead_process_leaves_though_its_successor_answers_at_its_address(
    nats_url: str, served: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted container has another name and the same address."""
    monkeypatch.setattr(membership, "EXPIRY_SECONDS", 0.5)
    kinds = (Kind.ENGINE, Kind.PROCESSOR)
    processor = dataclasses.replace(served, kind=Kind.PROCESSOR)
    second = dataclasses.replace(processor, replica_id="its second model")
    async with (
        Bus.open(nats_url) as bus,
        Members(bus, kinds).running() as members,
        Heartbeat.running(bus, lambda: served),
        Heartbeat.running(bus, lambda: processor),
    ):
        await wait_for(members, served, processor)
        dead = [
            dataclasses.replace(each, replica_id="dead", epoch=new_epoch())
            for each in (served, processor)
        ]
        for each in [*dead, second]:
            members.on_member(each, from_bus=True)
        for each in dead:
            await wait_until_gone(members, each)
        assert members.of(Kind.ENGINE) == [served]
        assert members.of(Kind.PROCESSOR) == [processor, second]


async def test_an_engine_that_is_gone_leaves_without_a_bus_though_another_one_has_its_address(
    served: Member,
) -> None:
    dead = dataclasses.replace(served, replica_id="dead", epoch=new_epoch())
    async with Members(Bus(None), ENGINES).running() as members:
        members.on_member(dead, from_bus=False)
        await wait_until_gone(members, dead)
        assert members.of(Kind.ENGINE) == [served]


async def test_a_seed_leaves_behind_the_join_of_the_member_that_it_turns_out_to_be(
    served: Member,
) -> None:
    changes: list[tuple[ChangeKind, str]] = []
    processor = dataclasses.replace(served, kind=Kind.PROCESSOR)
    seed = Member(kind=Kind.PROCESSOR, replica_id=served.address, epoch=0, address=served.address)
    members = Members(Bus(None), (Kind.PROCESSOR,))
    members.on_member(seed, from_bus=False)
    members.on_change(lambda change: changes.append((change.kind, change.member.replica_id)))
    members.on_member(processor, from_bus=True)
    assert changes[1:] == [
        (ChangeKind.JOINED, processor.replica_id),
        (ChangeKind.LEFT, served.address),
    ]
