"""The index while Redis answers and refuses: a right is missing, a key has another type."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from headwater.services.index.column import IndexColumn
from headwater.services.index.reaper import Reaper
from headwater.services.index.slots import SlotTable, own_key, slots_key
from headwater.services.index.writer import IndexWriter
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_valkey
from tests.services.index.test_writer import FIRST, OTHER, block, blocks, stored, wait_for_column


@pytest_asyncio.fixture
async def own_store(free_dir: Path) -> AsyncIterator[Store]:
    server = await start_valkey(free_dir)
    async with Store.open(server.url) as store:
        yield store
    await server.stop()


async def slots_of(store: Store, model: ServedModel) -> set[int]:
    return {slot.number for slot in await SlotTable(store, model.key, 0).read()}


async def test_an_engine_writes_and_reaps_again_once_redis_lets_it(
    own_store: Store, served_model: ServedModel
) -> None:
    dead = IndexColumn(own_store, served_model.key, 0, OTHER)
    dead.add(block(7))
    async with IndexWriter(own_store, served_model, FIRST).running() as writer:
        writer.apply(stored(1))
        await wait_for_column(own_store, served_model, {block(1)}, seconds=60)
        assert await dead.write()
        await own_store.command("ACL", "SETUSER", "default", "-@scripting")
        writer.apply(stored(2))
        # Longer than a turn of the writer and one of the reaper.
        await asyncio.sleep(2)
        assert await own_store.command("SMEMBERS", own_key(served_model.key, 0, 0)) == {block(1)}
        await own_store.command("ACL", "SETUSER", "default", "+@scripting")
        await dead.leave()
        await wait_for_column(own_store, served_model, set(blocks(1, 2)), seconds=60)
        async with asyncio.timeout(60):
            while dead_slots := await slots_of(own_store, served_model) - {writer.slots[0]}:
                assert len(dead_slots) == 1
                await asyncio.sleep(0.05)


async def test_a_column_that_redis_refuses_to_reap_keeps_no_other_from_it(
    own_store: Store, served_model: ServedModel
) -> None:
    for owner in (FIRST, OTHER):
        column = IndexColumn(own_store, served_model.key, 0, owner)
        column.add(block(1))
        assert await column.write()
        await column.leave()
    await own_store.command("SET", own_key(served_model.key, 0, 0), "not a set")
    reaper = Reaper(own_store, served_model.key, 1)
    assert await reaper.reap() == 1
    assert await slots_of(own_store, served_model) == {0}
    await own_store.command("DEL", own_key(served_model.key, 0, 0))
    assert await reaper.reap() == 1


async def test_a_shard_that_redis_refuses_to_write_keeps_no_other_from_it(
    own_store: Store, served_model: ServedModel
) -> None:
    sharded = dataclasses.replace(served_model, num_shards=2)
    await own_store.command("SET", slots_key(served_model.key, 0), "no table")
    async with IndexWriter(own_store, sharded, FIRST).running() as writer, asyncio.timeout(60):
        while writer.slots != [None, 0]:  # noqa: ASYNC110 (Redis has no event for it)
            await asyncio.sleep(0.02)
        await own_store.command("DEL", slots_key(served_model.key, 0))
        while writer.slots != [0, 0]:  # noqa: ASYNC110 (Redis has no event for it)
            await asyncio.sleep(0.02)
