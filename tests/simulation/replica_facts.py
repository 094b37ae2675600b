"""Messages of a simulated replica: heartbeats, load, cached blocks, as often as a real engine's and
from its log.

It also answers a follower of its cache and a prober. Knows nothing about the replica's computing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc
from grpc.aio import Metadata

from headwater.proto import engine_pb2, events_pb2
from headwater.services.engine.stage.facts import LOAD_SECONDS
from headwater.services.engine.stage.kv_events import KvEventLog
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, ReplicaLoad
from headwater.services.runtime.prober import Prober
from headwater.services.runtime.tasks import owned_task


class ReplicaFacts:
    """Messages of one replica. Use within `running`. `log` takes changes of the cache; `changed`
    reports that the load changed."""

    def __init__(
        self,
        member: Member,
        bus: Bus,
        load: Callable[[], ReplicaLoad],
        also: Callable[[events_pb2.KvEventBatch], None] | None = None,
    ) -> None:
        """`also` gets every batch of events, as the writer of the index in Redis does."""
        self.member = member
        self._bus = bus
        self._load = load
        self._also = also
        self.log = KvEventLog(
            events_pb2.Incarnation(replica_id=member.replica_id, epoch=member.epoch)
        )
        self.log.publish = self._keep
        self._unsent: deque[events_pb2.KvEventBatch] = deque()
        self._has_changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ReplicaFacts]:
        async with Heartbeat.running(self._bus, self.describe), owned_task(self._publish()):
            yield self

    def describe(self) -> Member:
        return replace(self.member, load=replace(self._load(), kv_seq=self.log.seq))

    def changed(self) -> None:
        self._has_changed.set()

    def _keep(self, batch: events_pb2.KvEventBatch) -> None:
        if self._also is not None:
            self._also(batch)
        self._unsent.append(batch)
        self._has_changed.set()

    async def _publish(self) -> None:
        key = self.member.model_key
        replica_id = self.member.replica_id
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            while self._unsent:
                batch = self._unsent.popleft()
                batch.published_at = asyncio.get_running_loop().time()
                await self._bus.publish(
                    subjects.kv_events(key, replica_id), batch.SerializeToString()
                )
            load = self._load().to_pb(replica_id, self.member.epoch)
            await self._bus.publish(subjects.load(key, replica_id), load.SerializeToString())
            await asyncio.sleep(LOAD_SECONDS)


class ProberTwin(Prober):
    """Finds simulated replicas by address."""

    def __init__(self, find: Callable[[str], ReplicaFacts | None]) -> None:
        super().__init__()
        self._find = find

    async def probe(self, kind: Kind, address: str) -> Member | None:
        facts = self._find(address) if kind is Kind.ENGINE else None
        return facts.describe() if facts is not None else None


class EngineStub:
    """The engine's methods for a follower, answered from a simulated replica's messages."""

    def __init__(self, find: Callable[[], ReplicaFacts | None]) -> None:
        """`find` returns the replica at the address now, if there is one."""
        self._find = find

    async def KvEvents(
        self, request: engine_pb2.KvEventsRequest, timeout: float
    ) -> AsyncIterator[events_pb2.KvEventBatch]:
        replica = self._reached()
        batches = (
            replica.log.since(request.after_seq) if request.epoch == replica.member.epoch else None
        )
        if batches is None:
            raise _failure(grpc.StatusCode.OUT_OF_RANGE)
        for batch in batches:
            yield batch

    async def KvSnapshot(
        self, request: engine_pb2.KvSnapshotRequest, timeout: float
    ) -> AsyncIterator[engine_pb2.KvSnapshotPart]:
        replica = self._reached()
        seq, hashes = replica.log.snapshot()
        incarnation = events_pb2.Incarnation(
            replica_id=replica.member.replica_id, epoch=replica.member.epoch
        )
        yield engine_pb2.KvSnapshotPart(
            incarnation=incarnation, seq=seq, block_hashes=hashes, last=True
        )

    def _reached(self) -> ReplicaFacts:
        replica = self._find()
        if replica is None:
            raise _failure(grpc.StatusCode.UNAVAILABLE)
        return replica


def _failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), Metadata())
