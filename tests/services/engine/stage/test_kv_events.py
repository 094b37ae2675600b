from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.step_output import CacheEvents, StoredChain
from headwater.proto.events_pb2 import Incarnation, KvEventBatch
from headwater.services.engine.stage import kv_events
from headwater.services.engine.stage.kv_events import _MAX_KEPT_HASHES, KvEventLog, checksum_of

BLOCKS = [bytes([i]) * 16 for i in range(12)]
events = st.builds(
    CacheEvents,
    stored=st.lists(
        st.builds(
            StoredChain, parent=st.just(b""), hashes=st.lists(st.sampled_from(BLOCKS), max_size=4)
        )
    ),
    removed=st.lists(st.sampled_from(BLOCKS), max_size=4),
    cleared=st.booleans(),
)


def after(cached: set[bytes], batch: KvEventBatch | CacheEvents) -> set[bytes]:
    """What is cached after a batch, by the order of its parts: cleared, removed, stored."""
    cached = (set() if batch.cleared else cached) - set(batch.removed)
    for chain in batch.stored:
        cached |= set(chain.block_hashes if isinstance(batch, KvEventBatch) else chain.hashes)  # type: ignore[union-attr]
    return cached


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(events, max_size=30),
    flush_after=st.sets(st.integers(0, 29)),
    missed=st.integers(0, 30),
)
def test_batches_snapshot_and_replay_have_the_events_of_the_steps(
    steps: list[CacheEvents], flush_after: set[int], missed: int
) -> None:
    async def tell() -> None:
        log = KvEventLog(Incarnation(replica_id="r", epoch=5))
        batches = []
        cached = set[bytes]()
        log.publish = batches.append
        for i, step in enumerate(steps):
            cached = after(cached, step)
            log.note(step)
            if i in flush_after:
                log.flush()
        seq, hashes = log.snapshot()
        assert set(hashes) == cached
        assert [batch.seq for batch in batches] == list(range(1, seq + 1))
        replayed: set[bytes] = set()
        for batch in batches:
            replayed = after(replayed, batch)
            checksum = 0
            for block in replayed:
                checksum ^= checksum_of(block)
            assert (batch.index_count, batch.index_xor) == (len(replayed), checksum)
        assert replayed == cached
        assert log.since(missed) == (batches[missed:] if missed <= seq else None)

    asyncio.run(tell())


async def test_what_was_cached_before_anybody_listened_is_published_whole_and_once() -> None:
    log = KvEventLog(Incarnation(replica_id="r", epoch=5))
    batches = list[KvEventBatch]()
    stored = [number.to_bytes(16, "little") for number in range(_MAX_KEPT_HASHES + 20000)]
    for start in range(0, len(stored), 4000):
        log.note(CacheEvents(stored=[StoredChain(parent=b"", hashes=stored[start : start + 4000])]))
    log.open(batches.append)
    assert [
        block for batch in batches for chain in batch.stored for block in chain.block_hashes
    ] == stored
    assert [batch.seq for batch in batches] == list(range(1, log.seq + 1))
    log.note(CacheEvents(removed=stored[:1]))
    log.flush()
    assert list(batches[-1].removed) == stored[:1]
    assert log.since(0) is None, "from then on only recent ones are kept"


async def test_events_of_many_blocks_come_in_batches_that_the_bus_takes() -> None:
    log = KvEventLog(Incarnation(replica_id="r", epoch=5))
    batches = list[KvEventBatch]()
    log.publish = batches.append
    blocks = [number.to_bytes(16, "little") for number in range(100_000)]
    log.note(CacheEvents(stored=[StoredChain(parent=b"p" * 16, hashes=blocks)]))
    log.note(CacheEvents(removed=blocks[:-1]))
    log.flush()
    assert max(batch.ByteSize() for batch in batches) < 512 * 1024
    stored = [chain for batch in batches for chain in batch.stored]
    assert [block for chain in stored for block in chain.block_hashes] == blocks
    # Each part of a chain continues the one before it.
    last_blocks = [chain.block_hashes[-1] for chain in stored]
    assert [chain.parent_hash for chain in stored] == [b"p" * 16, *last_blocks[:-1]]
    assert [block for batch in batches for block in batch.removed] == blocks[:-1]
    assert (batches[-1].index_count, log.snapshot()) == (1, (log.seq, blocks[-1:]))


async def test_an_idle_engine_flushes_its_last_events_soon() -> None:
    log = KvEventLog(Incarnation(replica_id="r", epoch=5))
    batches = asyncio.Queue[KvEventBatch]()
    log.publish = batches.put_nowait
    log.note(CacheEvents(stored=[StoredChain(parent=b"", hashes=BLOCKS[:2])]))
    log.note(CacheEvents(stored=[StoredChain(parent=BLOCKS[1], hashes=BLOCKS[2:3])]))
    async with asyncio.timeout(60):
        batch = await batches.get()
    assert [list(chain.block_hashes) for chain in batch.stored] == [BLOCKS[:2], BLOCKS[2:3]]
    assert (batch.incarnation.replica_id, batch.incarnation.epoch, batch.seq) == ("r", 5, 1)


@pytest.mark.parametrize("ends", [False, True], ids=["a prompt", "an end"])
async def test_blocks_of_answers_that_go_on_wait_until_there_is_more_to_say(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(kv_events, "ROUTINE_FLUSH_SECONDS", 600.0)
    log = KvEventLog(Incarnation(replica_id="r", epoch=5))
    batches = asyncio.Queue[KvEventBatch]()
    log.publish = batches.put_nowait
    routine = CacheEvents(stored=[StoredChain(parent=b"", hashes=BLOCKS[:1])])
    log.note(routine, is_routine=True)
    await asyncio.sleep(2 * kv_events.FLUSH_SECONDS)
    assert batches.empty()
    if ends:
        log.flush_soon()
    else:
        log.note(CacheEvents(stored=[StoredChain(parent=BLOCKS[0], hashes=BLOCKS[1:2])]))
    async with asyncio.timeout(60):
        batch = await batches.get()
    hashes = [block for chain in batch.stored for block in chain.block_hashes]
    assert hashes == (BLOCKS[:1] if ends else BLOCKS[:2])


async def test_old_batches_are_not_kept_for_ever() -> None:
    log = KvEventLog(Incarnation(replica_id="r", epoch=5))
    log.open(lambda _: None)
    for i in range(40):
        chain = [(i * 8192 + j).to_bytes(16, "little") for j in range(8192)]
        log.note(CacheEvents(stored=[StoredChain(parent=b"", hashes=chain)]))
    assert log.seq == 40
    assert log.since(0) is None
    assert [batch.seq for batch in log.since(8) or []] == list(range(9, 41))
