"""KV events of many replicas through a real bus into one index, and how fast it takes them in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headwater.proto.engine_pb2 import KvEventsRequest, KvSnapshotPart, KvSnapshotRequest
from headwater.proto.events_pb2 import Incarnation, KvEventBatch
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_nats, start_valkey

from .synthetic_publishers import BLOCKS_PER_BATCH, EPOCH, MODEL, SyntheticPublisher, publishers

Row = dict[str, Any]
RATES = (100_000, 150_000, 200_000, 250_000, 300_000, 350_000, 400_000, 600_000, 800_000, 1_000_000)
"""Blocks a second, over all replicas."""
STEP_SECONDS = 5.0
"""Seconds at each rate: longer than a gateway's patience."""
PUBLISH_EVERY = 0.02
CONNECT_SECONDS = 30.0


class EmptySnapshot:
    """Snapshot of an empty cache, so that a follower starts with the first event."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id

    async def KvSnapshot(
        self, request: KvSnapshotRequest, timeout: float
    ) -> AsyncIterator[KvSnapshotPart]:
        yield KvSnapshotPart(
            incarnation=Incarnation(replica_id=self._replica_id, epoch=EPOCH), seq=0, last=True
        )

    async def KvEvents(
        self, request: KvEventsRequest, timeout: float
    ) -> AsyncIterator[KvEventBatch]:
        """Yields nothing: it is called before any event was published, so none is missing."""
        nothing: tuple[KvEventBatch, ...] = ()
        for batch in nothing:
            yield batch


@contextlib.asynccontextmanager
async def _empty_snapshots(address: str) -> AsyncIterator[EmptySnapshot]:
    yield EmptySnapshot(address)


async def live(num_replicas: int, num_blocks: int) -> Row:
    """Rate at which the gateway began to read Redis instead, and its share of a core at lower
    rates."""
    with tempfile.TemporaryDirectory(prefix="headwater-events-") as name:
        nats, valkey = await start_nats(Path(name)), await start_valkey(Path(name))
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=publish, args=(there, nats.url, num_replicas, num_blocks), daemon=True
        )
        child.start()
        try:
            return {
                "replicas": num_replicas,
                **await _follow(here, nats.url, valkey.url, num_replicas, num_blocks),
            }
        finally:
            child.kill()
            child.join()
            await nats.stop()
            await valkey.stop()


async def _follow(
    there: Connection, nats_url: str, redis_url: str, num_replicas: int, num_blocks: int
) -> Row:
    shares: dict[int, float] = {}
    async with (
        Bus.open(nats_url, wait_seconds=CONNECT_SECONDS) as bus,
        Store.open(redis_url) as store,
    ):
        members = Members(bus, (Kind.ENGINE,))
        feed = IndexFeed(bus, members, store, dial=_empty_snapshots)
        async with feed.running():
            for each in publishers(num_replicas, num_blocks):
                members.on_member(each.member, from_bus=True)
            for rate in RATES:
                # The publisher is done with its preparations.
                await asyncio.to_thread(there.recv)
                there.send(None)
                cpu = time.process_time()
                began = time.monotonic()
                await asyncio.to_thread(there.recv)
                shares[rate] = round((time.process_time() - cpu) / (time.monotonic() - began), 3)
                if feed.is_read_through:
                    return {
                        "read_through_at": rate,
                        "core_share": shares,
                        "known": len(feed.index(MODEL.key)),
                    }
            return {
                "read_through_at": None,
                "core_share": shares,
                "known": len(feed.index(MODEL.key)),
            }


def publish(parent: Connection, url: str, num_replicas: int, num_blocks: int) -> None:
    """Publishes in a process of its own: at each rate, for some seconds, on the parent's
    command."""
    asyncio.run(_publish(parent, url, num_replicas, num_blocks))


async def _publish(parent: Connection, url: str, num_replicas: int, num_blocks: int) -> None:
    in_turn = itertools.cycle(publishers(num_replicas, num_blocks))
    async with Bus.open(url, wait_seconds=CONNECT_SECONDS) as bus:
        for rate in RATES:
            messages = list(_messages(in_turn, int(rate * STEP_SECONDS / BLOCKS_PER_BATCH)))
            parent.send("ready")
            await asyncio.to_thread(parent.recv)
            began = time.monotonic()
            sent = 0
            a_second = rate / BLOCKS_PER_BATCH
            while sent < len(messages):
                due = int((time.monotonic() - began) * a_second)
                for subject, payload in messages[sent:due]:
                    await bus.publish(subject, payload)
                sent = max(sent, due)
                await asyncio.sleep(PUBLISH_EVERY)
            parent.send("sent")


def _messages(in_turn: Iterator[SyntheticPublisher], number: int) -> Iterator[tuple[str, bytes]]:
    for each in itertools.islice(in_turn, number):
        yield subjects.kv_events(MODEL.key, each.replica_id), each.batch()
