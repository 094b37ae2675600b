"""An engine's facts on their way out: events and load over the bus, its column of the index, its
membership."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator

from headwater.proto.events_pb2 import KvEventBatch

from ...index.column import Owner
from ...index.writer import IndexWriter
from ...runtime import subjects
from ...runtime.bus import Bus
from ...runtime.heartbeat import Heartbeat
from ...runtime.member import ReplicaLoad
from ...runtime.store import Store
from ...runtime.tasks import owned_task, set_within
from ..settings import EngineSettings
from .replica import Replica
from .server import EngineServer
from .tenant_sweep import TenantSweep
from .waiting_credit import WaitingCredits

LOAD_SECONDS = 0.025
"""Seconds between two load messages of a busy engine, at least."""
ROUTINE_LOAD_SECONDS = 0.1
"""Seconds between two load messages while answers only get longer."""
_IDLE_LOAD_SECONDS = 1.0
_MAX_WAITING_BATCHES = 4096
"""Number of batches that wait for the bus. The oldest are dropped first; a reader that misses them
asks for a replay."""


class EngineFacts:
    """Publishes load, heartbeats and cache events of the engine. Without NATS or Redis nothing is
    published, and nothing else changes."""

    def __init__(
        self,
        bus: Bus,
        index: IndexWriter,
        replica: Replica,
        server: EngineServer,
        credits: WaitingCredits,
    ) -> None:
        self._bus = bus
        self._index = index
        self._replica = replica
        self._server = server
        self._credits = credits
        self._batches: deque[KvEventBatch] = deque(maxlen=_MAX_WAITING_BATCHES)
        self._batch_waits = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def published(
        cls, settings: EngineSettings, replica: Replica, server: EngineServer
    ) -> AsyncIterator[EngineFacts]:
        """A member of the cluster for the length of a scope; leaving it leaves the membership, then
        the index.

        Raises `ModelRefused` when the cluster serves the model differently.
        """
        owner = Owner(
            replica_id=replica.replica_id,
            epoch=replica.epoch,
            address=replica.address,
            capacity=server.load().num_total_blocks,
        )
        async with (
            Bus.open(settings.nats_url or None, inboxes=subjects.ENGINE_INBOXES) as bus,
            Store.open(settings.redis_url or None) as store,
            IndexWriter(store, replica.model, owner).running() as index,
            WaitingCredits(time.monotonic).running(bus, replica.model.key) as credits,
            TenantSweep.running(bus, settings.kv_disk_dir),
        ):
            facts = cls(bus, index, replica, server, credits)
            async with (
                owned_task(facts._publish_batches()),
                owned_task(facts._publish_load()),
                Heartbeat.running(
                    bus,
                    lambda: replica.describe(facts.load(), server.without, server.adapters.shown),
                ),
            ):
                yield facts

    def load(self) -> ReplicaLoad:
        """Load of the engine, with the number of tokens that each gateway may have waiting here."""
        load = self._server.load()
        return dataclasses.replace(load, waiting_credits=self._credits.shares(load.prefill_tps))

    def publish_batch(self, batch: KvEventBatch) -> None:
        """Takes a batch of KV events; never waits."""
        self._index.apply(batch)
        self._batches.append(batch)
        self._batch_waits.set()

    async def _publish_batches(self) -> None:
        subject = subjects.kv_events(self._replica.model.key, self._replica.replica_id)
        while True:
            while self._batches:
                batch = self._batches.popleft()
                batch.published_at = time.time()
                await self._bus.publish(subject, batch.SerializeToString())
            self._batch_waits.clear()
            await self._batch_waits.wait()

    async def _publish_load(self) -> None:
        replica = self._replica
        load_changed = self._server.load_changed
        subject = subjects.load(replica.model.key, replica.replica_id)
        while True:
            load = self.load()
            message = load.to_pb(replica.replica_id, replica.epoch)
            await self._bus.publish(subject, message.SerializeToString())
            await asyncio.sleep(LOAD_SECONDS)
            has_news = await set_within(load_changed, ROUTINE_LOAD_SECONDS - LOAD_SECONDS)
            if not has_news and not load.num_running:
                await set_within(load_changed, _IDLE_LOAD_SECONDS)
            load_changed.clear()
