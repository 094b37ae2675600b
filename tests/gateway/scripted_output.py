"""An output processor, and engines, that say what a test tells them to: what stands behind a real
gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headwater.proto import (
    engine_pb2_grpc,
    events_pb2,
    output_processor_pb2_grpc,
    processor_pb2,
    processor_pb2_grpc,
)
from headwater.proto.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, LossCause
from headwater.proto.engine_pb2 import KvSnapshotPart, Start, Work
from headwater.proto.events_pb2 import Incarnation, KvEventBatch, Member, RefusedField
from headwater.proto.output_processor_pb2 import GatewayFrame, Open, OutputFinish, OutputFrame
from headwater.services.runtime.member import Kind
from headwater.services.runtime.prober import SERVICES


class ScriptedOutputProcessor(output_processor_pb2_grpc.OutputProcessorServicer):
    def __init__(self) -> None:
        self.opens: list[Open] = []
        self.cancels: dict[int, str] = {}
        self._outgoing: asyncio.Queue[OutputFrame | None] = asyncio.Queue()
        self._received = asyncio.Condition()

    async def Session(
        self, request_iterator: AsyncIterator[GatewayFrame], context: Any
    ) -> AsyncIterator[OutputFrame]:
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (frame := await self._outgoing.get()) is not None:
                yield frame
        finally:
            reading.cancel()

    async def _read(self, frames: AsyncIterator[GatewayFrame]) -> None:
        async for frame in frames:
            self.cancels.update({cancel.stream_id: cancel.reason for cancel in frame.cancels})
            self.opens += frame.opens
            for part in frame.parts:
                opened = next(
                    each for each in reversed(self.opens) if part.stream_id in each.add.stream_ids
                )
                opened.add.output_ids.extend(part.output_ids)
            async with self._received:
                self._received.notify_all()

    async def receives(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._received:
            await self._received.wait_for(condition)

    def begin(self) -> None:
        """Counts requests from here on."""
        self.opens.clear()

    async def open(self, number: int) -> Open:
        """The request that came as that number, with all of the output that it resumes."""
        await self.receives(
            lambda: (
                len(self.opens) > number
                and len(self.opens[number].add.output_ids)
                == self.opens[number].add.num_output_tokens
            )
        )
        return self.opens[number]

    def start(self, stream_id: int) -> None:
        self._outgoing.put_nowait(OutputFrame(starts=[Start(stream_id=stream_id)]))

    def tokens(
        self, stream_id: int, first: int, token_ids: Sequence[int], text: str, offset: int
    ) -> None:
        columns: dict[str, Any] = {
            "first_index": [first],
            "num_tokens": [len(token_ids)],
            "text_offset": [offset],
        }
        self._outgoing.put_nowait(
            OutputFrame(stream_ids=[stream_id], token_ids=token_ids, texts=[text], **columns)
        )

    def leave(self) -> None:
        """Ends the session; the gateway comes again as if to another one."""
        self._outgoing.put_nowait(None)

    def end(self, stream_id: int, num_output_tokens: int, work: Work | None = None) -> None:
        finish = OutputFinish(
            stream_id=stream_id,
            reason=FINISH_REASON_LENGTH,
            num_output_tokens=num_output_tokens,
            work=work,
        )
        self._outgoing.put_nowait(OutputFrame(finishes=[finish]))

    def lose(self, stream_id: int, cause: LossCause.ValueType) -> None:
        finish = OutputFinish(
            stream_id=stream_id, reason=FINISH_REASON_ERROR, retriable=True, cause=cause
        )
        self._outgoing.put_nowait(OutputFrame(finishes=[finish]))


class NamedEngine(engine_pb2_grpc.EngineServicer):
    """Says who it is; whatever is sent there goes to the scripted output processor."""

    def __init__(
        self,
        replica_id: str,
        address: str,
        model: events_pb2.ServedModel,
        refused_fields: Sequence[RefusedField] = (),
    ) -> None:
        self._member = Member(
            kind=Member.KIND_ENGINE,
            incarnation=Incarnation(replica_id=replica_id, epoch=7),
            address=address,
            model=model,
            numerics_id="n",
            refused_fields=refused_fields,
        )

    async def Info(self, request: Any, context: Any) -> Member:
        return self._member

    async def KvEvents(self, request: Any, context: Any) -> AsyncIterator[KvEventBatch]:
        for batch in list[KvEventBatch]():
            yield batch

    async def KvSnapshot(self, request: Any, context: Any) -> AsyncIterator[KvSnapshotPart]:
        yield KvSnapshotPart(incarnation=self._member.incarnation, last=True)


@contextlib.asynccontextmanager
async def scripted_stages(
    processor: str, num_engines: int, refused_fields: Sequence[RefusedField] = ()
) -> AsyncIterator[tuple[ScriptedOutputProcessor, str, list[str]]]:
    """The output processor, its address, and those of engines of the processor's model, which
    refuse these fields."""
    async with grpc.aio.insecure_channel(processor) as channel:
        stub: Any = processor_pb2_grpc.ProcessorStub(channel)
        (model,) = (
            await stub.ListModels(processor_pb2.ProcessorModelsRequest(), wait_for_ready=True)
        ).models
    script = ScriptedOutputProcessor()
    servers = [grpc.aio.server()]
    engines = list[str]()
    output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(script, servers[0])
    healthy = health.aio.HealthServicer()
    await healthy.set(SERVICES[Kind.OUTPUT_PROCESSOR], health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, servers[0])
    address = f"127.0.0.1:{servers[0].add_insecure_port('127.0.0.1:0')}"
    for number in range(num_engines):
        servers.append(grpc.aio.server())
        engines.append(f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}")
        engine_pb2_grpc.add_EngineServicer_to_server(
            NamedEngine(f"e{number}", engines[-1], model, refused_fields), servers[-1]
        )
    for server in servers:
        await server.start()
    try:
        yield script, address, engines
    finally:
        for server in servers:
            await server.stop(None)
