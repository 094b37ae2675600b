from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from headwater.proto import events_pb2
from headwater.services.index import slots as slots_module
from headwater.services.index import writer as writer_module
from headwater.services.index.column import IndexColumn, Owner
from headwater.services.index.reader import IndexReader
from headwater.services.index.reaper import Reaper
from headwater.services.index.slots import SlotTable, block_prefix, own_key, shard_of, slots_key
from headwater.services.index.writer import IndexWriter
from headwater.services.models.entry import register
from headwater.services.models.model_refused import ModelRefused
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store, StoreUnavailable
from headwater.services.stack.embedded import start_valkey
from tests.simulation.store_twin import RedisTwin, StoreTwin

FIRST = Owner(replica_id="a", epoch=11, address="127.0.0.1:1", capacity=100)
REBORN = dataclasses.replace(FIRST, epoch=12)
OTHER = Owner(replica_id="b", epoch=21, address="127.0.0.1:2", capacity=100)


@pytest.fixture(params=["one server", "a cluster", "a twin"])
async def store(
    request: pytest.FixtureRequest, redis_url: str, cluster_url: str
) -> AsyncIterator[Store]:
    if request.param == "a twin":
        yield StoreTwin(RedisTwin(), time.monotonic)
        return
    url = (
        redis_url
        if request.param == "one server"
        else cluster_url.replace("redis://", "redis+cluster://")
    )
    async with Store.open(url) as opened:
        yield opened


def block(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def blocks(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]


def stored(*numbers: int, parent: bytes = b"") -> events_pb2.KvEventBatch:
    return events_pb2.KvEventBatch(
        stored=[events_pb2.StoredBlocks(parent_hash=parent, block_hashes=blocks(*numbers))]
    )


async def bits_of(
    store: Store, model: ServedModel, hashes: Iterable[bytes], shard: int = 0
) -> set[int]:
    """The live slots that claim any of the blocks."""
    live = {slot.number for slot in await SlotTable(store, model.key, shard).read() if slot.is_live}
    claimed = set()
    for each in hashes:
        bitmap = await store.command("GET", block_prefix(model.key, shard) + each) or b""
        claimed |= {
            8 * i + bit for i, byte in enumerate(bitmap) for bit in range(8) if byte & (128 >> bit)
        }
    return claimed & live


async def held_by(
    store: Store, model: ServedModel, slot: int | None, hashes: Iterable[bytes]
) -> set[bytes]:
    assert slot is not None
    return {each for each in hashes if slot in await bits_of(store, model, [each])}


async def test_slots_are_handed_out_lowest_free_number_first(
    store: Store, served_model: ServedModel
) -> None:
    table = SlotTable(store, served_model.key, 0)
    assert [
        await table.take("a", 1, "x", 1),
        await table.take("b", 2, "y", 1),
        await table.take("c", 3, "z", 1),
    ] == [
        0,
        1,
        2,
    ]
    assert await table.retire(1, 2)
    assert await Reaper(store, served_model.key, 1).reap() == 1
    assert await table.take("d", 4, "w", 1) == 1


async def test_a_lease_is_renewed_by_its_epoch_only_and_expires_on_rediss_clock(
    store: Store, served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = SlotTable(store, served_model.key, 0)
    long = 600_000
    short = 50
    monkeypatch.setattr(slots_module, "LEASE_MS", long)
    slot = await table.take("a", 1, "x", 7)
    assert await table.publish(slot, 1, "a")
    assert [(each.is_live, each.is_expired, each.capacity) for each in await table.read()] == [
        (True, False, 7)
    ]
    monkeypatch.setattr(slots_module, "LEASE_MS", short)
    assert not await table.renew(slot, 2)
    await asyncio.sleep(2 * short / 1000)
    assert [(each.is_live, each.is_expired) for each in await table.read()] == [(True, False)]
    assert await table.renew(slot, 1)
    await asyncio.sleep(2 * short / 1000)
    assert [(each.is_live, each.is_expired) for each in await table.read()] == [(False, True)]
    monkeypatch.setattr(slots_module, "LEASE_MS", long)
    assert await table.renew(slot, 1)
    assert [(each.is_live, each.is_expired) for each in await table.read()] == [(True, False)]


async def written(writer: IndexWriter) -> None:
    """Returns when Redis has everything that was applied before."""
    async with asyncio.timeout(60):
        for column in writer._columns:
            while column._needs_filling or column._pending or column._published.unanswered:  # noqa: ASYNC110 (Redis ends it)
                await asyncio.sleep(0.005)


async def test_a_column_says_what_was_stored_and_not_what_was_removed(
    store: Store, served_model: ServedModel
) -> None:
    async with IndexWriter(store, served_model, FIRST).running() as writer:
        writer.apply(stored(*range(1000)))
        writer.apply(events_pb2.KvEventBatch(removed=blocks(*range(500, 1000))))
        await written(writer)
        everything = blocks(*range(1000))
        assert await held_by(store, served_model, writer.slots[0], everything) == set(
            blocks(*range(500))
        )
        assert await store.command("EXISTS", block_prefix(served_model.key, 0) + block(700)) == 0


async def test_changes_soon_after_a_write_wait_for_the_next_one(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreTwin(RedisTwin(), time.monotonic)
    async with IndexWriter(store, served_model, FIRST).running() as writer:
        writer.apply(stored(0))
        await written(writer)
        monkeypatch.setattr(writer_module, "WRITE_SECONDS", 60.0)
        writer.apply(stored(1))
        await written(writer)
        writer.apply(stored(2))
        for _ in range(100):
            await asyncio.sleep(0)
        everything = blocks(0, 1, 2)
        held = await held_by(store, served_model, writer.slots[0], everything)
        assert held == set(blocks(0, 1))


async def test_two_replicas_share_a_bitmap(store: Store, served_model: ServedModel) -> None:
    async with (
        IndexWriter(store, served_model, FIRST).running() as one,
        IndexWriter(store, served_model, OTHER).running() as two,
    ):
        one.apply(stored(1, 2))
        two.apply(stored(2, 3))
        await written(one)
        await written(two)
        assert await bits_of(store, served_model, blocks(2)) == {one.slots[0], two.slots[0]}
        one.apply(events_pb2.KvEventBatch(cleared=True))
        await written(one)
        assert await bits_of(store, served_model, blocks(1, 2, 3)) == {two.slots[0]}


async def test_a_restarted_engine_takes_a_new_slot_and_its_old_bits_are_dead_at_once(
    store: Store, served_model: ServedModel
) -> None:
    before = IndexColumn(store, served_model.key, 0, FIRST)
    for each in blocks(1, 2, 3):
        before.add(each)
    assert await before.write()
    after = IndexColumn(store, served_model.key, 0, REBORN)
    after.add(block(3))
    assert await after.write()
    assert (before.slot, after.slot) == (0, 1)
    assert await bits_of(store, served_model, blocks(1, 2)) == set()
    assert await bits_of(store, served_model, blocks(3)) == {1}

    # The incarnation that was thought dead writes once more: refused, and nothing of it is seen.
    before.add(block(4))
    assert not await before.write()
    assert await bits_of(store, served_model, blocks(4)) == set()


async def test_the_reaper_leaves_no_key_of_dead_columns_and_none_of_the_living_is_touched(
    store: Store, served_model: ServedModel
) -> None:
    dead = IndexColumn(store, served_model.key, 0, FIRST)
    living = IndexColumn(store, served_model.key, 0, OTHER)
    for each in blocks(*range(600)):
        dead.add(each)
    for each in blocks(*range(300)):
        living.add(each)
    assert await dead.write()
    assert await living.write()
    await dead.leave()
    assert await Reaper(store, served_model.key, 1).reap() == 1
    exist = [
        await store.command("EXISTS", block_prefix(served_model.key, 0) + each)
        for each in blocks(*range(600))
    ]
    assert exist == [1] * 300 + [0] * 300
    assert await store.command("EXISTS", own_key(served_model.key, 0, 0)) == 0
    assert [slot.number for slot in await SlotTable(store, served_model.key, 0).read()] == [1]
    assert await bits_of(store, served_model, blocks(0)) == {1}


async def test_a_reply_that_was_lost_is_asked_for_again_without_harm(
    store: Store, served_model: ServedModel
) -> None:
    column = IndexColumn(store, served_model.key, 0, FIRST)
    column.add(block(1))
    assert await column.write()
    writer = column._published
    assert writer is not None
    await writer.write([(block(2), True)])
    writer._seq -= 1
    writer.unanswered = [(block(2), True)]
    assert await column.write()
    column.add(block(3))
    assert await column.write()
    assert await bits_of(store, served_model, blocks(3)) == {column.slot}


async def test_a_resync_under_writes_ends_with_exactly_what_is_cached(
    store: Store, served_model: ServedModel
) -> None:
    rng = random.Random(0)
    cached = set[bytes]()
    async with IndexWriter(store, served_model, FIRST).running() as writer:
        writer.apply(stored(*range(2000)))
        cached |= set(blocks(*range(2000)))
        await written(writer)
        old_slot = writer.slots[0]
        for turn in range(100):
            if turn == 10:
                writer._columns[0].rewrite()
            new = stored(*range(10_000 + 20 * turn, 10_020 + 20 * turn))
            gone = rng.sample(sorted(cached), 20)
            cached = (cached - set(gone)) | set(new.stored[0].block_hashes)
            new.removed.extend(gone)
            writer.apply(new)
            await asyncio.sleep(0.001)
            visible = [
                slot.number
                for slot in await SlotTable(store, served_model.key, 0).read()
                if slot.is_live
            ]
            assert len(visible) == 1
        await written(writer)
        assert writer.slots[0] != old_slot
        assert (
            set(await store.command("SMEMBERS", own_key(served_model.key, 0, writer.slots[0] or 0)))
            == cached
        )


async def test_shards_take_a_chain_whole_by_the_hash_of_its_root(
    store: Store, served_model: ServedModel
) -> None:
    sharded = dataclasses.replace(served_model, num_shards=4)
    async with IndexWriter(store, sharded, FIRST).running() as writer:
        for root in range(8):
            writer.apply(stored(root, 100 + root))
            writer.apply(stored(200 + root, parent=block(100 + root)))
        await written(writer)
        for root in range(8):
            shard = shard_of(block(root), 4)
            assert await bits_of(store, sharded, blocks(200 + root), shard) == {writer.slots[shard]}
            chain = blocks(root, 100 + root, 200 + root, 300 + root)
            assert await IndexReader(store, seconds=5.0).matched(sharded, chain) == {
                (FIRST.replica_id, FIRST.epoch): 3
            }


async def test_a_model_that_is_served_differently_is_refused_by_the_name_of_the_field(
    store: Store, served_model: ServedModel
) -> None:
    await register(store, served_model)
    await register(store, served_model)
    with pytest.raises(ModelRefused, match=r"block_size is 64; the model .* is served with 16"):
        await register(store, dataclasses.replace(served_model, block_size=64))
    with pytest.raises(ModelRefused, match="revision"):
        async with IndexWriter(
            store, dataclasses.replace(served_model, revision="r2"), FIRST
        ).running():
            pass


async def test_without_a_store_an_engine_notices_nothing(served_model: ServedModel) -> None:
    async with (
        Store.open(None) as nowhere,
        IndexWriter(nowhere, served_model, FIRST).running() as writer,
    ):
        writer.apply(stored(1, 2, 3))
        await asyncio.sleep(0.05)
        assert writer.slots == [None]


async def test_redis_started_late_killed_and_started_empty_has_the_whole_column_again(
    free_dir: Path, served_model: ServedModel
) -> None:
    server = await start_valkey(free_dir)
    await server.kill()
    cached = set(blocks(*range(1000)))
    async with (
        Store.open(server.url) as store,
        IndexWriter(store, served_model, FIRST).running() as writer,
    ):
        writer.apply(stored(*range(1000)))
        for turn in range(3):
            server = await start_valkey(free_dir, port=server.port)
            await wait_for_column(store, served_model, cached, seconds=60)
            await server.kill()
            for step in range(200):
                fresh = 10_000 + 1000 * turn + step
                writer.apply(stored(fresh))
                cached.add(block(fresh))
                await asyncio.sleep(0.001)


async def wait_for_column(
    store: Store, model: ServedModel, expected: set[bytes], *, seconds: float
) -> None:
    async with asyncio.timeout(seconds):
        while await whole_column(store, model) != expected:  # noqa: ASYNC110 (Redis has no event for it)
            await asyncio.sleep(0.02)


async def whole_column(store: Store, model: ServedModel) -> set[bytes]:
    with contextlib.suppress(StoreUnavailable):
        live = [slot.number for slot in await SlotTable(store, model.key, 0).read() if slot.is_live]
        if live:
            return set(await store.command("SMEMBERS", own_key(model.key, 0, live[0])))
    return set()


async def test_flushing_redis_under_an_idle_engine_brings_the_column_back(
    redis_url: str, served_model: ServedModel
) -> None:
    async with (
        Store.open(redis_url) as store,
        IndexWriter(store, served_model, FIRST).running() as writer,
    ):
        writer.apply(stored(*range(300)))
        await written(writer)
        await store.command("DEL", slots_key(served_model.key, 0), own_key(served_model.key, 0, 0))
        await wait_for_column(store, served_model, set(blocks(*range(300))), seconds=60)
