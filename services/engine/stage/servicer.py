"""The engine's gRPC methods. Knows the wire; the work is the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from headwater.proto import engine_pb2 as pb
from headwater.proto import engine_pb2_grpc, events_pb2

from ...runtime.errors import BadRequest
from ...runtime.role import ROLES
from ...runtime.tasks import owned_task
from .replica import Replica
from .sent_adapters import check_sent
from .server import EngineServer
from .weights import EngineWeights

_PART_HASHES = 8192
"""Hashes of a snapshot's part, which stays below the limit of a frame."""
Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, server: EngineServer, replica: Replica, weights: EngineWeights) -> None:
        self._server = server
        self._weights = weights
        self._replica = replica
        self.drain_wanted = asyncio.Event()
        """Set when a client has asked for a drain; the service then calls `drain`."""
        self._drain_seconds: float | None = None
        self._drained: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

    async def drain(self, seconds: float) -> None:
        """Lets what runs end within `seconds`, or within what a client asked for, and answers that
        client."""
        self._drained.set_result(await self._server.drain(self._drain_seconds or seconds))

    async def Session(
        self, frames: AsyncIterator[pb.ClientFrame], context: Context
    ) -> AsyncIterator[pb.EngineFrame]:
        with self._server.session() as session:
            # A connection that breaks while a frame is being written does not resume this
            # generator.
            context.add_done_callback(lambda _: session.abandon())  # type: ignore[arg-type]
            async for frame in session.run(frames):
                yield frame

    async def KvEvents(
        self, request: pb.KvEventsRequest, context: Context
    ) -> AsyncIterator[events_pb2.KvEventBatch]:
        epoch = self._replica.epoch
        if request.epoch != epoch:
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE,
                f"epoch is {request.epoch}; this incarnation's: {epoch}",
            )
        batches = self._server.events.since(request.after_seq)
        if batches is None:
            text = f"the batches after {request.after_seq} are not kept; take a snapshot"
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, text)
        for batch in batches:
            yield batch

    async def KvSnapshot(
        self, request: pb.KvSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.KvSnapshotPart]:
        seq, hashes = self._server.events.snapshot()
        for start in range(0, max(len(hashes), 1), _PART_HASHES):
            yield pb.KvSnapshotPart(
                incarnation=self._replica.incarnation,
                seq=seq,
                block_hashes=hashes[start : start + _PART_HASHES],
                last=start + _PART_HASHES >= len(hashes),
            )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        if request.limit_ms:
            self._drain_seconds = request.limit_ms / 1000
        self.drain_wanted.set()
        num_finished, num_cancelled = await asyncio.shield(self._drained)
        return pb.DrainReply(num_finished=num_finished, num_cancelled=num_cancelled)

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleReply:
        BadRequest.unless(request.role in ROLES, "role", request.role, " or ".join(ROLES))
        before = self._server.role
        self._server.role = request.role
        structlog.get_logger().info("role changed", role=request.role, before=before)
        return pb.SetRoleReply(before=before)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepReply:
        load = await self._server.sleep_calls.sleep()
        return pb.SleepReply(num_bytes=load.num_released_bytes, seconds=load.sleep_seconds)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeReply:
        load = await self._server.sleep_calls.wake()
        return pb.WakeReply(seconds=load.wake_seconds)

    async def LoadWeights(
        self, request: pb.LoadWeightsRequest, context: Context
    ) -> pb.LoadWeightsReply:
        number, numerics_id = await self._weights.load(request.folder)
        return pb.LoadWeightsReply(number=number, numerics_id=numerics_id)

    async def ReplaceWeights(
        self, request: pb.ReplaceWeightsRequest, context: Context
    ) -> pb.ReplaceWeightsReply:
        seconds = await self._weights.replace(request.number, ends_requests=request.ends_requests)
        return pb.ReplaceWeightsReply(seconds=seconds)

    async def DropWeights(
        self, request: pb.DropWeightsRequest, context: Context
    ) -> pb.DropWeightsReply:
        self._weights.drop(request.number)
        return pb.DropWeightsReply()

    async def Prefetch(
        self, requests: AsyncIterator[pb.PrefetchRequest], context: Context
    ) -> pb.PrefetchReply:
        async for request in requests:
            if request.epoch != self._replica.epoch:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, "another incarnation is meant"
                )
            async with owned_task(_read_to_the_end(requests)) as is_left:
                await self._server.prefetches.run(request, is_left)
            break
        return pb.PrefetchReply()

    async def CheckAdapter(
        self, request: pb.CheckAdapterRequest, context: Context
    ) -> pb.CheckAdapterReply:
        read = await self._server.adapters.check(request.folder, request.within, request.digest)
        return pb.CheckAdapterReply(digest=read.digest, rank=read.rank, num_bytes=read.num_bytes)

    async def SendAdapter(
        self, requests: AsyncIterator[pb.AdapterPart], context: Context
    ) -> pb.CheckAdapterReply:
        read = await check_sent(self._server.adapters, requests)
        return pb.CheckAdapterReply(digest=read.digest, rank=read.rank, num_bytes=read.num_bytes)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterReply:
        if request.name:
            self._server.adapters.unload(request.name)
        else:
            self._server.adapters.forget(request.digest)
        return pb.UnloadAdapterReply()

    async def Info(self, request: pb.InfoRequest, context: Context) -> events_pb2.Member:
        return self._replica.describe(
            self._server.load(), self._server.without, self._server.adapters.shown
        ).to_pb()


async def _read_to_the_end(requests: AsyncIterator[pb.PrefetchRequest]) -> None:
    async for _ in requests:
        pass
