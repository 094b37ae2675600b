"""An engine that has one address for the bus and another one as a seed, such as a service's name:
one member."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from headwater.proto import engine_pb2_grpc
from headwater.services.runtime import heartbeat, membership, prober
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.runtime.membership import ChangeKind, Members
from headwater.services.runtime.served_model import ServedModel
from tests.services.runtime.test_membership import ENGINES, Engine, listening_on_one_port, wait_for


class TwoAddresses:
    """An engine that listens at both, and the changes of a membership."""

    def __init__(self, model: ServedModel, port: int) -> None:
        self.by_seed, self.advertised = (
            Member(
                kind=Kind.ENGINE,
                replica_id="engine-0",
                epoch=new_epoch(),
                address=f"{host}:{port}",
                model=model,
                load=ReplicaLoad(num_running=1),
            )
            for host in HOSTS
        )
        self.advertised = dataclasses.replace(self.advertised, epoch=self.by_seed.epoch)
        self.seeds = {Kind.ENGINE: [self.by_seed.address]}
        self.changes: list[tuple[ChangeKind, str]] = []

    def follow(self, members: Members) -> None:
        self.changes.clear()
        members.on_change(lambda change: self.changes.append((change.kind, change.member.address)))

    def moves(self) -> list[tuple[ChangeKind, str]]:
        """Joins and leaves. Each report of an engine that tells its load is an update."""
        return [change for change in self.changes if change[0] is not ChangeKind.UPDATED]

    def addresses(self) -> set[str]:
        return {address for _, address in self.changes}


HOSTS = ["127.0.0.2", "127.0.0.3"]
ASKED_OFTEN = 6
"""Number of probes after which an engine has been asked at each address, and heard, more than
once."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and heartbeats follow quickly, and a probe waits 20 s, because a running process may
    be slow to answer."""
    monkeypatch.setattr(prober, "PROBE_SECONDS", 20.0)
    monkeypatch.setattr(membership, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)


class Running(TwoAddresses):
    def __init__(self, model: ServedModel, port: int, servers: list[grpc.aio.Server]) -> None:
        super().__init__(model, port)
        self.at_seed, self.at_advertised = servers
        for server in servers:
            engine_pb2_grpc.add_EngineServicer_to_server(Engine(self.advertised), server)  # type: ignore[no-untyped-call]


@pytest.fixture
async def twofold(served_model: ServedModel, quick: None) -> AsyncIterator[Running]:
    port, servers = await listening_on_one_port(HOSTS)
    running = Running(served_model, port, servers)
    for server in servers:
        await server.start()
    yield running
    for server in servers:
        await server.stop(None)


async def probed() -> None:
    asked = Engine.num_asked
    async with asyncio.timeout(60):
        while Engine.num_asked < asked + ASKED_OFTEN:  # noqa: ASYNC110 (a counter has no event)
            await asyncio.sleep(0.02)


async def test_an_engine_is_one_member_by_the_address_that_was_reported_first(
    nats_url: str, twofold: Running
) -> None:
    for first in (twofold.by_seed, twofold.advertised):
        async with (
            Bus.open(nats_url) as bus,
            Members(bus, ENGINES, twofold.seeds).running() as members,
        ):
            members.on_member(first, from_bus=first is twofold.advertised)
            twofold.follow(members)
            async with Heartbeat.running(bus, lambda: twofold.advertised):
                await probed()
                assert members.of(Kind.ENGINE) == [first]
        assert twofold.addresses() == {first.address}


async def test_an_advertised_address_that_cannot_be_reached_from_here_gives_way_to_the_seed(
    nats_url: str, twofold: Running
) -> None:
    await twofold.at_advertised.stop(None)
    async with Bus.open(nats_url) as bus, Members(bus, ENGINES, twofold.seeds).running() as members:
        members.on_member(twofold.advertised, from_bus=True)
        async with Heartbeat.running(bus, lambda: twofold.advertised):
            await wait_for(members, twofold.by_seed)
            twofold.follow(members)
            await probed()
            assert twofold.moves() == [(ChangeKind.JOINED, twofold.by_seed.address)]


async def test_an_engine_goes_on_by_its_other_address_when_the_first_no_longer_answers(
    served_model: ServedModel,
) -> None:
    reported = TwoAddresses(served_model, 1)
    members = Members(Bus(None), ENGINES)
    seed = reported.by_seed.address
    advertised = reported.advertised.address
    reported.follow(members)
    members.on_member(reported.by_seed, from_bus=False)
    members.on_member(reported.advertised, from_bus=True)
    members._on_answer((Kind.ENGINE, seed), None)
    members.on_member(reported.advertised, from_bus=True)
    assert reported.addresses() == {seed}, "one failure may be a hiccup"
    members._on_answer((Kind.ENGINE, seed), None)
    assert reported.moves()[1:] == [(ChangeKind.LEFT, seed), (ChangeKind.JOINED, advertised)]
    assert members.of(Kind.ENGINE) == [reported.advertised]


async def test_an_engine_that_neither_address_reaches_leaves_once(
    served_model: ServedModel,
) -> None:
    reported = TwoAddresses(served_model, 1)
    members = Members(Bus(None), ENGINES)
    reported.follow(members)
    members.on_member(reported.by_seed, from_bus=False)
    members.on_member(reported.advertised, from_bus=True)
    for _ in range(2):
        members._on_answer((Kind.ENGINE, reported.by_seed.address), None)
    assert reported.moves() == [
        (ChangeKind.JOINED, reported.by_seed.address),
        (ChangeKind.LEFT, reported.by_seed.address),
    ]
    assert not members.everyone()
