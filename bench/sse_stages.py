"""Stages that answer a gateway with made-up tokens, as fast as the gateway reads them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headwater.proto import engine_pb2, events_pb2, output_processor_pb2, processor_pb2
from headwater.services.runtime.channel import server_options
from headwater.services.runtime.prober import SERVICES
from headwater.services.runtime.served_model import ServedModel

REPLICA = "synthetic"
WORDS = (" the", " river", " runs", " “down”", " to", "\n", " sea", ",")
Frame = Any


class Streams:
    """Streams that the other end of a session opened, with the position of each."""

    def __init__(self) -> None:
        self.credit: dict[int, int] = {}
        self.sent: dict[int, int] = {}

    async def follow(self, frames: AsyncIterator[Any]) -> None:
        async for frame in frames:
            for add in (
                [opened.add for opened in frame.opens] if hasattr(frame, "opens") else frame.adds
            ):
                for stream_id in add.stream_ids:
                    self.credit[stream_id] = add.credit
                    self.sent[stream_id] = 0
            for more in frame.credits:
                if more.stream_id in self.credit:
                    self.credit[more.stream_id] += more.tokens
            for cancel in frame.cancels:
                self.credit.pop(cancel.stream_id, None)
                self.sent.pop(cancel.stream_id, None)

    def advance(self) -> tuple[list[int], list[int]]:
        """Adds a token to every stream that has credit; returns the streams and the tokens'
        indices."""
        rows = [stream_id for stream_id, left in self.credit.items() if left > 0]
        first = [self.sent[stream_id] for stream_id in rows]
        for stream_id in rows:
            self.credit[stream_id] -= 1
            self.sent[stream_id] += 1
        return rows, first


def text_frame(step: int, rows: list[int], first: list[int]) -> Frame:
    """Frame as an output processor sends it."""
    return output_processor_pb2.OutputFrame(
        stream_ids=rows,
        first_index=first,
        num_tokens=[1] * len(rows),
        token_ids=[step % 1000] * len(rows),
        texts=[WORDS[step % len(WORDS)]] * len(rows),
        text_offset=first,
    )


def token_frame(step: int, rows: list[int], first: list[int]) -> Frame:
    """Frame as an engine sends it."""
    token_ids = random.choices(range(300, 20_000), k=len(rows))
    return engine_pb2.EngineFrame(
        step=step,
        stream_ids=rows,
        first_index=first,
        num_tokens=[1] * len(rows),
        token_ids=token_ids,
    )


def session(
    make: Callable[[int, list[int], list[int]], Frame],
) -> Callable[[Any, Any], AsyncIterator[Frame]]:
    """Handler of a Session that sends frames as fast as they are taken."""

    async def carry(incoming: AsyncIterator[Any], context: Any) -> AsyncIterator[Frame]:
        streams = Streams()
        reader = asyncio.create_task(streams.follow(incoming))
        try:
            for step in range(sys.maxsize):
                rows, first = streams.advance()
                if rows:
                    yield make(step, rows, first)
                await asyncio.sleep(0 if rows else 0.001)
        finally:
            reader.cancel()

    return carry


class Stages:
    """Simulated stages behind a gateway, without text or model."""

    def __init__(
        self, model: ServedModel, text_session: Callable[[Any, Any], AsyncIterator[Frame]]
    ) -> None:
        self._model = model
        self._text_session = text_session
        self.address = ""

    async def list_models(self, request: Any, context: Any) -> processor_pb2.ProcessorModelsReply:
        return processor_pb2.ProcessorModelsReply(models=[self._model.to_pb()])

    async def prepare(
        self, request: processor_pb2.PrepareRequest, context: Any
    ) -> processor_pb2.PrepareReply:
        request.sampling.n = 1
        return processor_pb2.PrepareReply(
            prompt_ids=range(16), sampling=request.sampling, block_size=16
        )

    async def prepare_session(
        self, incoming: AsyncIterator[processor_pb2.PrepareFrame], context: Any
    ) -> AsyncIterator[processor_pb2.PreparedFrame]:
        await context.send_initial_metadata(())
        async for frame in incoming:
            yield processor_pb2.PreparedFrame(
                calls=[
                    processor_pb2.PreparedCall(
                        id=call.id, reply=await self.prepare(call.request, context)
                    )
                    for call in frame.calls
                ]
            )

    async def info(self, request: Any, context: Any) -> events_pb2.Member:
        return events_pb2.Member(
            kind=events_pb2.Member.KIND_ENGINE,
            incarnation=events_pb2.Incarnation(replica_id=REPLICA, epoch=1),
            address=self.address,
            model=self._model.to_pb(),
            model_key=self._model.key,
            load=events_pb2.Load(num_total_blocks=1 << 20),
        )

    async def kv_snapshot(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.KvSnapshotPart]:
        incarnation = events_pb2.Incarnation(replica_id=REPLICA, epoch=1)
        yield engine_pb2.KvSnapshotPart(incarnation=incarnation, last=True)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the services. NOTE: generic handlers, since two of the services have a method of one
        name."""
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        both = grpc.stream_stream_rpc_method_handler
        services: dict[str, dict[str, tuple[Any, Any, Any]]] = {
            "Processor": {
                "ListModels": (unary, self.list_models, processor_pb2.ProcessorModelsRequest),
                "Prepare": (unary, self.prepare, processor_pb2.PrepareRequest),
                "PrepareSession": (both, self.prepare_session, processor_pb2.PrepareFrame),
            },
            "OutputProcessor": {
                "Session": (both, self._text_session, output_processor_pb2.GatewayFrame)
            },
            "Engine": {
                "Session": (both, session(token_frame), engine_pb2.ClientFrame),
                "Info": (unary, self.info, engine_pb2.InfoRequest),
                "KvSnapshot": (stream, self.kv_snapshot, engine_pb2.KvSnapshotRequest),
            },
        }
        for name, methods in services.items():
            handlers = {
                method: kind(handler, request.FromString, lambda reply: reply.SerializeToString())
                for method, (kind, handler, request) in methods.items()
            }
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"headwater.v1.{name}", handlers),)
            )


async def serve_stages(stages: Stages) -> None:
    """The role `stages`: writes its address to standard output and serves until it is killed."""
    server = grpc.aio.server(options=server_options())
    healthy = health.aio.HealthServicer()
    stages.add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    stages.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for service in SERVICES.values():
        await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
    print(stages.address, flush=True)
    await server.wait_for_termination()
