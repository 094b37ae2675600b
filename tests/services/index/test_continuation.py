"""Where a chain can be continued by a replica whose layers see windows or keep states: as events
and Redis say, and as its cache does."""

from __future__ import annotations

import dataclasses
import random
from hashlib import blake2b

from headwater.engine_core.kv.prefix_hash import mark_of
from headwater.proto import events_pb2
from headwater.services.index.column import Owner
from headwater.services.index.continuation import last_continued
from headwater.services.index.kv_index import KvIndex
from headwater.services.index.reader import IndexReader
from headwater.services.index.writer import IndexWriter
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from tests.services.index.caching_engine import eventually

WINDOW_AND_STATE = (0, 3, 1)


def chain(start: int, length: int) -> list[bytes]:
    return [
        blake2b(number.to_bytes(8), digest_size=16).digest()
        for number in range(start, start + length)
    ]


def marked(kind: int, *indices: int) -> list[bytes]:
    return [mark_of(chain(idx, 1)[0], kind) for idx in indices]


def batch(seq: int, stored: list[bytes], removed: list[bytes]) -> events_pb2.KvEventBatch:
    return events_pb2.KvEventBatch(
        incarnation=events_pb2.Incarnation(replica_id="a", epoch=1),
        seq=seq,
        stored=[events_pb2.StoredBlocks(block_hashes=stored)],
        removed=removed,
    )


def by_definition(blocks_seen: tuple[int, ...], held: list[set[int]], end: int) -> int:
    """Blocks behind which every kind has the blocks before them that it sees."""
    return next(
        (
            num_blocks
            for num_blocks in range(end, 0, -1)
            if all(
                not num_seen
                or held[kind].issuperset(range(max(0, num_blocks - num_seen), num_blocks))
                for kind, num_seen in enumerate(blocks_seen)
            )
        ),
        0,
    )


def test_the_last_position_that_every_kind_can_continue_is_found() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        blocks_seen = (0, rng.randrange(1, 5), rng.randrange(1, 3))
        end = rng.randrange(0, 14)
        held = [{idx for idx in range(end) if rng.random() < 0.8} for _ in blocks_seen]
        found = last_continued(blocks_seen, lambda kind, idx, h=held: idx in h[kind], 0, end)
        assert found == by_definition(blocks_seen, held, end), (blocks_seen, held, end)


def test_only_blocks_that_are_known_count() -> None:
    has = {1: {5, 6, 7}}
    assert last_continued((0, 3), lambda kind, idx: idx in has[kind], 5, 9) == 8
    assert last_continued((0, 4), lambda kind, idx: idx in has[kind], 5, 9) == 0


def test_an_index_counts_blocks_up_to_the_last_snapshot_within_them() -> None:
    index = KvIndex()
    column = index.open("a", 1, (0, 1))
    index.publish(column, 0)
    index.apply(batch(1, [*chain(0, 10), *marked(1, 3, 7)], []))
    assert index.lookup(chain(0, 10)) == {"a": 8}
    assert index.lookup(chain(0, 7)) == {"a": 4}
    assert index.lookup(chain(0, 3)) == {}
    index.apply(batch(2, [], marked(1, 7)))
    assert index.lookup(chain(0, 10)) == {"a": 4}


def test_a_replica_whose_layers_all_see_a_window_needs_no_blocks_before_it() -> None:
    index = KvIndex()
    index.publish(index.open("a", 1, (2,)), 0)
    index.publish(index.open("b", 1), 0)
    index.apply(batch(1, chain(4, 3), []))
    assert index.lookup(chain(0, 10)) == {"a": 7}


def test_a_request_on_its_way_counts_until_its_blocks_are_there() -> None:
    index = KvIndex()
    index.publish(index.open("a", 1, (0, 1)), 0)
    index.expect("a", chain(0, 10), 60.0)
    assert index.lookup(chain(0, 5)) == {"a": 5}
    index.apply(batch(1, [*chain(0, 10), *marked(1, 9)], []))
    assert index.lookup(chain(0, 5)) == {}
    assert index.lookup(chain(0, 10)) == {"a": 10}


async def test_redis_says_where_a_chain_can_be_continued(
    redis_url: str, served_model: ServedModel
) -> None:
    model = dataclasses.replace(served_model, blocks_seen=WINDOW_AND_STATE, num_shards=4)
    owner = Owner(replica_id="a", epoch=1, address="here:1", capacity=1000)
    async with (
        Store.open(redis_url) as store,
        IndexWriter(store, model, owner).running() as writer,
    ):
        reader = IndexReader(store, seconds=5.0)
        stored = batch(1, chain(0, 200), [])
        for idx in (*range(10, 20), *range(100, 160)):
            stored.stored.add(parent_hash=chain(idx, 1)[0], block_hashes=marked(1, idx))
        for idx in (15, 150, 180):
            stored.stored.add(parent_hash=chain(idx, 1)[0], block_hashes=marked(2, idx))
        writer.apply(stored)
        await eventually(lambda: all(slot is not None for slot in writer.slots))
        await eventually(lambda: not any(column._pending for column in writer._columns))
        key = "a", 1
        assert await reader.matched(model, chain(0, 200)) == {key: 151}
        assert await reader.matched(model, chain(0, 150)) == {key: 16}
        assert await reader.matched(model, chain(0, 15)) == {}
        one_kind = dataclasses.replace(model, blocks_seen=())
        assert await reader.matched(one_kind, chain(0, 150)) == {key: 150}


def test_the_entry_of_an_engine_says_what_each_kind_needs(served_model: ServedModel) -> None:
    model = dataclasses.replace(served_model, blocks_seen=WINDOW_AND_STATE)
    sent = model.to_pb().SerializeToString()
    received = ServedModel.from_pb(events_pb2.ServedModel.FromString(sent))
    assert received.blocks_seen == WINDOW_AND_STATE
    assert hash(received) == hash(model)
    # Replicas with other pages serve the same model, and of one kind the entry is as before.
    assert model.mismatch(served_model) is None
    assert served_model.to_pb().SerializeToString() == sent.removesuffix(bytes((98, 3, 0, 3, 1)))
