"""Lag of events, and how long a routed prompt counts as cached, with engines whose clocks are
wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from headwater.gateway.router.dispatches import EXPECT_SECONDS
from headwater.gateway.router.lag import LEAST_SECONDS, MAX_SECONDS, EventLag
from headwater.gateway.router.router import Router
from headwater.proto import events_pb2
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from tests.gateway.router.test_router import BLOCK, IDLE, chain

REPLICA = ("a", 1)


class Gateway:
    """A router that follows one replica over a real bus."""

    def __init__(self, bus: Bus, model: ServedModel) -> None:
        self.now = 100.0
        self.bus = bus
        self.model = model
        self.members = Members(Bus(None), (Kind.ENGINE,))
        self.feed = IndexFeed(bus, self.members, Store(None), clock=lambda: self.now)
        self.registry = CollectorRegistry()
        self.router = Router(
            Bus(None), self.members, self.feed, registry=self.registry, clock=lambda: self.now
        )
        name, epoch = REPLICA
        self.replica = Member(
            kind=Kind.ENGINE,
            replica_id=name,
            epoch=epoch,
            address="127.0.0.1:1",
            model=model,
            load=IDLE,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        async with self.feed.running(), self.router.running():
            self.members.on_member(self.replica, from_bus=True)
            yield self

    async def receives(self, num_events: int, *, clock_offset: float) -> None:
        """Events of the replica, whose clock is ahead by so many seconds."""
        before = self.num_received
        for _ in range(num_events):
            batch = events_pb2.KvEventBatch(published_at=time.time() + clock_offset)
            batch.incarnation.replica_id, batch.incarnation.epoch = REPLICA
            await self.bus.publish(
                subjects.kv_events(self.model.key, "a"), batch.SerializeToString()
            )
        async with asyncio.timeout(60):
            while self.num_received < before + num_events:  # noqa: ASYNC110 (a metric has no event)
                await asyncio.sleep(0.005)

    @property
    def num_received(self) -> float:
        return self.registry.get_sample_value("headwater_router_event_lag_seconds_count") or 0.0

    def sends(self, blocks: list[bytes]) -> None:
        decision = self.router.choose(self.model.key, b"".join(blocks), len(blocks) * BLOCK + 1, 64)
        self.router.dispatches.begin(decision, "request")

    def believes(self, blocks: list[bytes]) -> bool:
        return self.feed.index(self.model.key).lookup(blocks) == {"a": len(blocks)}


@pytest.fixture
async def gateway(nats_url: str, served_model: ServedModel) -> AsyncIterator[Gateway]:
    async with Bus.open(nats_url) as bus, Gateway(bus, served_model).running() as made:
        yield made


@pytest.mark.parametrize("clock_offset", [50.0, -50.0], ids=["ahead", "behind"])
async def test_a_clock_that_is_wrong_neither_is_a_lag_nor_keeps_an_expectation(
    gateway: Gateway, clock_offset: float
) -> None:
    await gateway.receives(64, clock_offset=clock_offset)
    gateway.sends(chain("x", 4))
    expected = max(EXPECT_SECONDS, min(2 * gateway.router.event_lag, MAX_SECONDS))
    gateway.now += expected - 0.1
    assert gateway.believes(chain("x", 4))
    gateway.now += 0.2
    assert not gateway.believes(chain("x", 4))
    # The lag is a second or two on a machine that pauses, far less than the error of the clock.
    assert 0 < gateway.router.event_lag < 25
    assert 0 < gateway.registry.get_sample_value("headwater_router_event_lag_seconds_sum") < 64 * 25  # type: ignore[operator]


async def test_a_clock_that_is_set_back_keeps_an_expectation_for_a_bounded_time(
    gateway: Gateway,
) -> None:
    await gateway.receives(8, clock_offset=0.0)
    await gateway.receives(64, clock_offset=-50.0)
    gateway.sends(chain("x", 4))
    gateway.now += MAX_SECONDS - 0.1
    assert gateway.believes(chain("x", 4))
    gateway.now += 0.2
    assert not gateway.believes(chain("x", 4))


def test_a_lag_is_what_an_event_came_later_than_the_youngest_of_its_replica() -> None:
    lag = EventLag()
    ages = {
        ("a", 1): (50.0, 50.25, 50.0),
        ("b", 1): (-30.0, -29.5, -30.5),
        ("a", 2): (7.0, 7.0, 7.0),
    }
    seen = [[lag.observe(each, age, 0.0) for age in of] for each, of in ages.items()]
    assert seen == [[0.0, 0.25, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
    assert lag.p99 == 0.5


def test_a_clock_that_is_set_back_is_known_by_its_new_offset_two_windows_later() -> None:
    lag = EventLag()
    assert lag.observe(REPLICA, 0.0, 0.0) == 0.0
    assert lag.observe(REPLICA, 50.0, 1.0) == 50.0
    assert lag.observe(REPLICA, 50.0, LEAST_SECONDS) == 50.0
    assert lag.observe(REPLICA, 50.0, 2 * LEAST_SECONDS) == 0.0
