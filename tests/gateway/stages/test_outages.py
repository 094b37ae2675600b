"""Whatever a gateway goes without: it routes by what it knows itself, nothing fails, and it says
what is missing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headwater.gateway.router.decision import Decision
from headwater.gateway.router.router import Router
from headwater.gateway.stages import outages
from headwater.gateway.stages.outages import EVENTS, NATS, REDIS, REDIS_IN_TIME, Outages
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import EmbeddedServer, start_nats, start_valkey
from tests.services.index.caching_engine import Engine, chain, eventually
from tests.simulation.cluster.relay import Relay

SECONDS = 60.0
"""Of patience with a machine that is busy with other things."""


@dataclass
class Servers:
    """A NATS, and a Redis behind a relay that can make it slow."""

    folder: Path
    nats: EmbeddedServer
    redis: EmbeddedServer
    relay: Relay

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator[Servers]:
        async with Relay().running() as relay:
            servers = cls(folder, await start_nats(folder), await start_valkey(folder), relay)
            relay.find = lambda: f"127.0.0.1:{servers.redis.port}"
            try:
                yield servers
            finally:
                await servers.nats.stop()
                await servers.redis.stop()

    async def lose(self, what: str) -> None:
        if what == NATS:
            await self.nats.kill()
        elif what == REDIS:
            await self.redis.kill()
        else:
            self.relay.delay = 0.05

    async def bring_back(self, what: str) -> None:
        if what == NATS:
            self.nats = await start_nats(self.folder, port=self.nats.port)
        elif what == REDIS:
            self.redis = await start_valkey(self.folder, port=self.redis.port)
        else:
            self.relay.delay = 0.0


class Gateway:
    """The part of one that routes."""

    def __init__(
        self, router: Router, feed: IndexFeed, missed: Outages, registry: CollectorRegistry
    ) -> None:
        self._router = router
        self.feed = feed
        self._missed = missed
        self._registry = registry

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, servers: Servers, seeds: list[str]) -> AsyncIterator[Gateway]:
        registry = CollectorRegistry()
        async with (
            Bus.open(servers.nats.url, wait_seconds=0.1) as bus,
            Store.open(f"redis://{servers.relay.address}") as store,
            Members(bus, (Kind.ENGINE,), {Kind.ENGINE: seeds}).running() as members,
            IndexFeed(bus, members, store).running() as feed,
            Router(bus, members, feed, registry=registry).running() as router,
            Outages(bus, store, feed, registry).running() as missed,
        ):
            yield cls(router, feed, missed, registry)

    async def routes(self, model: ServedModel, blocks: list[bytes]) -> Decision:
        hashes = b"".join(blocks)
        await self._router.consult(model.key, hashes)
        return self._router.choose(model.key, hashes, len(blocks) * model.block_size + 1, 64)

    async def finds(self, model: ServedModel, blocks: list[bytes], on: str) -> None:
        """Returns when all of it is found there; whatever is asked meanwhile is routed too."""
        async with asyncio.timeout(SECONDS):
            while True:
                decision = await self.routes(model, blocks)
                if decision.predicted_cached_tokens == len(blocks) * model.block_size:
                    assert decision.replica_id == on
                    return
                await asyncio.sleep(0.02)

    async def says(self, *missed: str) -> None:
        """That it goes without these; a Redis that is only late may be so on a busy machine."""
        sure = {*missed, NATS, REDIS, EVENTS}

        def is_reported() -> bool:
            value = self._registry.get_sample_value
            reported = {what for what in sure if value("headwater_without", {"what": what})}
            return reported == set(missed) == sure & set(self._missed.now())

        await eventually(is_reported, SECONDS)


@pytest.mark.parametrize(
    "lost", [(REDIS_IN_TIME,), (REDIS,), (NATS,), (NATS, REDIS)], ids=" and ".join
)
async def test_a_gateway_routes_by_its_own_index_says_what_it_is_without_and_takes_it_up_again(
    lost: tuple[str, ...],
    free_dir: Path,
    served_model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outages, "ASK_SECONDS", 0.05)
    async with (
        Servers.running(free_dir) as servers,
        Engine(served_model, "a").serving() as holder,
        Engine(served_model, "b").serving() as other,
        Bus.open(servers.nats.url) as theirs,
        Heartbeat.running(theirs, lambda: holder.member),
        Heartbeat.running(theirs, lambda: other.member),
        Gateway.running(servers, []) as gateway,
    ):
        await eventually(
            lambda: all(gateway.feed.is_synced(each.member) for each in (holder, other)), SECONDS
        )
        holder.stores(chain(0, 20))
        await holder.publish(theirs)
        await gateway.finds(served_model, chain(0, 20), on="a")
        await gateway.says()

        for what in lost:
            await servers.lose(what)
        await gateway.says(*lost)
        # What was known stays, and what is new comes, over gRPC where the bus is away.
        await gateway.finds(served_model, chain(0, 20), on="a")
        other.stores(chain(100, 20))
        await other.publish(theirs)
        await gateway.finds(served_model, chain(100, 20), on="b")
        # One that starts now knows the engines by their addresses at least.
        async with Gateway.running(servers, [holder.address, other.address]) as late:
            await late.says(*lost)
            await eventually(lambda: late.feed.is_synced(holder.member), SECONDS)
            await late.finds(served_model, chain(0, 20), on="a")

        for what in lost:
            await servers.bring_back(what)
        await gateway.says()
        await gateway.finds(served_model, chain(100, 20), on="b")
