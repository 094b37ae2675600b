"""An engine of which nothing is real but its cache events: numbered, kept, published and served as
an engine does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc

from headwater.engine_core.step_output import CacheEvents, StoredChain
from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2
from headwater.services.engine.stage.kv_events import KvEventLog
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member, new_epoch
from headwater.services.runtime.served_model import ServedModel


def chain(start: int, length: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * 2 for number in range(start, start + length)]


class Engine(engine_pb2_grpc.EngineServicer):
    """Its cache is what the test says."""

    def __init__(self, model: ServedModel, replica_id: str = "a") -> None:
        self.model = model
        self.replica_id = replica_id
        self.address = ""
        self.calls: list[str] = []
        self.unpublished: list[events_pb2.KvEventBatch] = []
        self.may_end = asyncio.Event()
        """Calls for a snapshot."""
        self.may_end.set()
        self.restart()

    def restart(self) -> None:
        self.epoch = new_epoch()
        self.log = KvEventLog(events_pb2.Incarnation(replica_id=self.replica_id, epoch=self.epoch))
        self.log.publish = self.unpublished.append

    @property
    def member(self) -> Member:
        return Member(
            kind=Kind.ENGINE,
            replica_id=self.replica_id,
            epoch=self.epoch,
            address=self.address,
            model=self.model,
        )

    def stores(self, hashes: list[bytes]) -> None:
        self.log.note(CacheEvents(stored=[StoredChain(parent=b"", hashes=hashes)]))
        self.log.flush()

    async def publish(self, bus: Bus) -> None:
        for batch in self.unpublished:
            await bus.publish(
                subjects.kv_events(self.model.key, self.replica_id), batch.SerializeToString()
            )
        self.unpublished.clear()

    async def Info(  # type: ignore[override]
        self, request: engine_pb2.InfoRequest, context: object
    ) -> events_pb2.Member:
        return self.member.to_pb()

    async def KvEvents(  # type: ignore[override]
        self, request: engine_pb2.KvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[events_pb2.KvEventBatch]:
        self.calls.append("events")
        batches = self.log.since(request.after_seq)
        if batches is None or request.epoch != self.epoch:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "not kept")
        for batch in batches or ():
            yield batch

    async def KvSnapshot(  # type: ignore[override]
        self, request: engine_pb2.KvSnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.KvSnapshotPart]:
        self.calls.append("snapshot")
        seq, hashes = self.log.snapshot()
        incarnation = events_pb2.Incarnation(replica_id=self.replica_id, epoch=self.epoch)
        half = len(hashes) // 2
        yield engine_pb2.KvSnapshotPart(
            incarnation=incarnation, seq=seq, block_hashes=hashes[:half]
        )
        yield engine_pb2.KvSnapshotPart(
            incarnation=incarnation, seq=seq, block_hashes=hashes[half:], last=True
        )
        await self.may_end.wait()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Engine]:
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)


async def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.005)
