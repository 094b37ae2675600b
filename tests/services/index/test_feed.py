from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headwater.services.index.column import IndexColumn, Owner
from headwater.services.index.feed import IndexFeed
from headwater.services.index.reader import Incarnation
from headwater.services.runtime import membership
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, ReplicaLoad, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store, StoreUnavailable
from headwater.services.stack.embedded import start_nats
from tests.services.index.caching_engine import Engine, chain, eventually


@pytest.fixture
async def engine(served_model: ServedModel) -> AsyncIterator[Engine]:
    async with Engine(served_model).serving() as serving:
        yield serving


@contextlib.asynccontextmanager
async def feeding(bus: Bus, store: Store) -> AsyncIterator[tuple[IndexFeed, Members]]:
    members = Members(bus, (Kind.ENGINE,))
    async with members.running(), IndexFeed(bus, members, store).running() as feed:
        yield feed, members


async def test_a_gateway_that_starts_late_knows_what_is_cached_by_a_snapshot_and_then_by_events(
    nats_url: str, engine: Engine
) -> None:
    engine.stores(chain(0, 100))
    engine.unpublished.clear()
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        assert index.lookup(chain(0, 100)) == {"a": 100}
        engine.stores(chain(100, 50))
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(0, 150)) == {"a": 150})
        assert engine.calls == ["snapshot"]


async def test_lost_batches_are_replayed_and_where_they_are_not_kept_a_snapshot_comes(
    nats_url: str, engine: Engine
) -> None:
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        engine.stores(chain(0, 10))
        engine.stores(chain(10, 10))
        del engine.unpublished[0]
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(0, 20)) == {"a": 20})
        assert engine.calls == ["snapshot", "events"]

        engine.stores(chain(20, 10))
        engine.stores(chain(30, 10))
        engine.log._kept.clear()
        engine.stores(chain(40, 10))
        del engine.unpublished[:2]
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(0, 50)) == {"a": 50})
        assert engine.calls == ["snapshot", "events", "events", "snapshot"]


async def test_a_checksum_that_disagrees_brings_one_snapshot_and_not_a_storm(
    nats_url: str, engine: Engine
) -> None:
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        for start in range(0, 30, 10):
            engine.stores(chain(start, 10))
            del engine.unpublished[-1].stored[0].block_hashes[5:]
            await engine.publish(bus)
            # The first one brings the snapshot.
            await eventually(lambda: index.lookup(chain(0, 10)) == {"a": 10})
        await eventually(lambda: all(column.seq == engine.log.seq for column in index.columns))
        assert engine.calls == ["snapshot", "snapshot"]


async def test_an_engine_that_leaves_as_its_snapshot_ends_is_forgotten_once(
    nats_url: str, engine: Engine
) -> None:
    engine.stores(chain(0, 100))
    engine.may_end.clear()
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: index.lookup(chain(0, 100)) == {"a": 100})
        members.on_member(dataclasses.replace(engine.member, leaving=True), from_bus=True)
        engine.may_end.set()
        await asyncio.sleep(0.05)
        index.sweep(1000)
        assert index.lookup(chain(0, 100)) == {}
        assert len(index) == 0


async def test_a_restarted_engine_has_none_of_its_old_blocks(nats_url: str, engine: Engine) -> None:
    engine.stores(chain(0, 10))
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        late = engine.unpublished[:]
        engine.restart()
        members.on_member(engine.member, from_bus=True)
        assert index.lookup(chain(0, 10)) == {}
        await eventually(lambda: feed.is_synced(engine.member))
        engine.unpublished[:0] = late
        engine.stores(chain(50, 5))
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(50, 5)) == {"a": 5})
        assert index.lookup(chain(0, 10)) == {}


async def test_without_nats_events_still_come_by_asking_and_after_its_return_by_themselves(
    free_dir: Path, engine: Engine
) -> None:
    nats_server = await start_nats(free_dir)
    async with (
        Bus.open(nats_server.url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        await nats_server.kill()
        engine.stores(chain(0, 10))
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(0, 10)) == {"a": 10})
        nats_server = await start_nats(free_dir, port=nats_server.port)
        assert await bus.wait_connected(60)
        members.on_member(engine.member, from_bus=True)
        engine.stores(chain(10, 10))
        await engine.publish(bus)
        await eventually(lambda: index.lookup(chain(0, 20)) == {"a": 20})
    await nats_server.stop()


@pytest.fixture
def silent(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that cannot be asked. It stays a member although no probe succeeds."""
    monkeypatch.setattr(membership, "_PROBE_FAILURES", 1 << 30)
    engine = Engine(served_model)
    engine.address = "127.0.0.1:1"
    return engine


def column_of(store: Store, engine: Engine, num_blocks: int) -> IndexColumn:
    """An engine's column in Redis, with blocks that have yet to be written."""
    owner = Owner(replica_id="a", epoch=engine.epoch, address=engine.address, capacity=100)
    column = IndexColumn(store, engine.model.key, 0, owner)
    for block in chain(0, num_blocks):
        column.add(block)
    return column


async def test_while_an_engine_cannot_be_asked_redis_says_what_it_caches(
    redis_url: str, served_model: ServedModel, silent: Engine
) -> None:
    async with (
        Bus.open(None) as bus,
        Store.open(redis_url) as store,
        feeding(bus, store) as (feed, members),
    ):
        members.on_member(silent.member, from_bus=False)
        column = column_of(store, silent, 70)
        assert await column.write()
        index = feed.index(served_model.key)
        assert index.lookup(chain(0, 100)) == {}
        # Reads have a limit of milliseconds, and this machine may be busy with other things for
        # longer than a lease.
        async with asyncio.timeout(60):
            while index.lookup(chain(0, 100)) != {"a": 70}:
                with contextlib.suppress(StoreUnavailable):
                    await column.write()
                await feed.consult(served_model.key, chain(0, 100))
                await asyncio.sleep(0.05)

        reborn = dataclasses.replace(silent.member, epoch=new_epoch())
        members.on_member(reborn, from_bus=False)
        await feed.consult(served_model.key, chain(0, 100))
        assert index.lookup(chain(0, 100)) == {}


async def test_an_engine_that_leaves_while_redis_is_read_has_no_column_any_more(
    redis_url: str, served_model: ServedModel, silent: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Bus.open(None) as bus,
        Store.open(redis_url) as store,
        feeding(bus, store) as (feed, members),
    ):
        members.on_member(silent.member, from_bus=False)
        column = column_of(store, silent, 10)
        matched = feed._reader.matched

        async def matched_before_it_left(
            model: ServedModel, hashes: Sequence[bytes]
        ) -> dict[Incarnation, int]:
            if found := await matched(model, hashes):
                members.on_member(dataclasses.replace(silent.member, leaving=True), from_bus=False)
            return found

        monkeypatch.setattr(feed._reader, "matched", matched_before_it_left)
        # Reads have a limit of milliseconds, and this machine may be busy with other things for
        # longer than a lease.
        async with asyncio.timeout(60):
            while members.of(Kind.ENGINE):
                with contextlib.suppress(StoreUnavailable):
                    await column.write()
                await feed.consult(served_model.key, chain(0, 10))
                await asyncio.sleep(0.05)
        assert list(feed.columns) == []


async def test_the_loss_of_the_last_batch_shows_by_the_second_heartbeat(
    nats_url: str, engine: Engine
) -> None:
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        engine.stores(chain(0, 10))
        engine.unpublished.clear()
        heartbeat = dataclasses.replace(engine.member, load=ReplicaLoad(kv_seq=engine.log.seq))
        members.on_member(heartbeat, from_bus=True)
        assert index.lookup(chain(0, 10)) == {}

        def is_known_after_another() -> bool:
            """One that comes before the first synchronization has ended, a moment after it shows,
            compares nothing."""
            members.on_member(heartbeat, from_bus=True)
            return index.lookup(chain(0, 10)) == {"a": 10}

        await eventually(is_known_after_another)
        assert engine.calls == ["snapshot", "events"]


async def test_a_doubted_replica_is_asked_once_and_copied_only_where_the_sums_disagree(
    nats_url: str, engine: Engine
) -> None:
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        column = index.column("a")
        assert column is not None
        index.fill(column, chain(500, 1))  # What the engine does not have.
        engine.stores(chain(0, 10))
        engine.unpublished.clear()
        for _ in range(5):
            feed.doubt(engine.member)
        await eventually(
            lambda: index.lookup(chain(0, 10)) == {"a": 10} and not index.lookup(chain(500, 1))
        )
        assert engine.calls == ["snapshot", "events", "snapshot"]


async def test_a_replica_can_be_doubted_while_the_call_for_its_snapshot_ends(
    nats_url: str, engine: Engine
) -> None:
    engine.may_end.clear()
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        await eventually(lambda: feed.is_synced(engine.member))
        engine.stores(chain(0, 10))
        engine.unpublished.clear()
        feed.doubt(engine.member)
        engine.may_end.set()
        await eventually(lambda: feed.index(engine.model.key).lookup(chain(0, 10)) == {"a": 10})
        assert engine.calls == ["snapshot", "events"]


async def test_a_gateway_that_events_keep_too_busy_passes_them_over_for_a_while_and_asks_redis(
    nats_url: str, redis_url: str, engine: Engine
) -> None:
    """Busy by the time that it had a core: on one that others use too, batches that take long are
    no burden."""
    now = 0.0
    work = 0.0
    work_a_batch = 0.01

    def worked() -> float:
        """Read before a batch and after it."""
        nonlocal work
        work += work_a_batch
        return work

    owner = Owner(replica_id="a", epoch=engine.epoch, address=engine.address, capacity=100)
    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store:
        members = Members(bus, (Kind.ENGINE,))
        feed = IndexFeed(bus, members, store, clock=lambda: now, work_clock=worked)
        async with members.running(), feed.running():
            members.on_member(engine.member, from_bus=True)
            index = feed.index(engine.model.key)
            await eventually(lambda: feed.is_synced(engine.member))
            for second in range(9):
                now += 1
                work_a_batch = 0.01 if second < 6 else 0.7
                engine.stores(chain(100 * second, 10))
                await engine.publish(bus)
                if second < 8:
                    await eventually(lambda: index.lookup(chain(100 * second, 10)) == {"a": 10})  # noqa: B023
            await eventually(lambda: not feed.is_sure(engine.model.key))
            assert feed.is_read_through
            assert index.lookup(chain(0, 30)) == {}
            column = IndexColumn(store, engine.model.key, 0, owner)
            for each in chain(0, 30):
                column.add(each)
            assert await column.write()
            # Reads have a limit of milliseconds, and this machine may be busy with other things.
            async with asyncio.timeout(60):
                while index.lookup(chain(0, 30)) != {"a": 30}:
                    await feed.consult(engine.model.key, chain(0, 30))
                    await asyncio.sleep(0.05)
            other = dataclasses.replace(engine.member, replica_id="b")
            feed.expect(other, chain(0, 40), 2.0)
            assert index.lookup(chain(0, 40)) == {"a": 30, "b": 40}
            now = now + 31
            work_a_batch = 0.01
            engine.stores(chain(2000, 5))
            await engine.publish(bus)
            await eventually(
                lambda: feed.is_sure(engine.model.key) and index.lookup(chain(2000, 5)) == {"a": 5}
            )
            assert index.lookup(chain(0, 10)) == {"a": 10}


async def test_an_engine_that_joins_while_events_are_ignored_is_followed_afterwards(
    nats_url: str, engine: Engine
) -> None:
    now = 0.0
    work = itertools.count()
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        Engine(engine.model, "b").serving() as late,
    ):
        members = Members(bus, (Kind.ENGINE,))
        feed = IndexFeed(
            bus, members, nowhere, clock=lambda: now, work_clock=lambda: float(next(work))
        )
        async with members.running(), feed.running():
            members.on_member(engine.member, from_bus=True)
            index = feed.index(engine.model.key)
            await eventually(lambda: feed.is_synced(engine.member))
            feed._read_through()
            late.stores(chain(0, 10))
            members.on_member(late.member, from_bus=True)
            await asyncio.sleep(0.3)
            # The feed passes the new engine's events over.
            assert not feed.is_synced(late.member)
            assert late.calls == []
            now += 31
            members.on_member(dataclasses.replace(late.member, load=ReplicaLoad()), from_bus=True)
            await eventually(
                lambda: feed.is_sure(engine.model.key) and index.lookup(chain(0, 10)) == {"b": 10}
            )


async def test_nothing_is_kept_of_a_model_whose_last_replica_has_left(
    nats_url: str, engine: Engine
) -> None:
    engine.stores(chain(0, 100))
    async with (
        Bus.open(nats_url) as bus,
        Store.open(None) as nowhere,
        feeding(bus, nowhere) as (feed, members),
    ):
        members.on_member(engine.member, from_bus=True)
        index = feed.index(engine.model.key)
        await eventually(lambda: feed.is_synced(engine.member))
        members.on_member(dataclasses.replace(engine.member, leaving=True), from_bus=True)
        assert len(index) == 0
        engine.restart()
        engine.stores(chain(0, 7))
        members.on_member(engine.member, from_bus=True)
        await eventually(lambda: index.lookup(chain(0, 9)) == {"a": 7})
