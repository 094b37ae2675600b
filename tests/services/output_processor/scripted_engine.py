"""An engine that says what a test tells it to, and a gateway that listens: both over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from headwater.proto import engine_pb2_grpc, output_processor_pb2_grpc
from headwater.proto.common_pb2 import FINISH_REASON_LENGTH, FinishReason, Sampling, ToolCallDelta
from headwater.proto.engine_pb2 import Add, AddPart, ClientFrame, Credit, EngineFrame, Finish
from headwater.proto.events_pb2 import Incarnation, Member
from headwater.proto.output_processor_pb2 import GatewayFrame, Open, OutputFinish, OutputFrame
from headwater.services.runtime.channel import server_options

EPOCH = 7


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.adds: list[Add] = []
        self.parts: list[AddPart] = []
        self.cancels: dict[int, str] = {}
        self.credits: list[Credit] = []
        self.asked: list[int] = []
        self.num_sessions = 0
        self.num_frames = 0
        self.address = ""
        self._outgoing: asyncio.Queue[EngineFrame] = asyncio.Queue()
        self._received = asyncio.Condition()

    async def Info(self, request: Any, context: Any) -> Member:
        return Member(
            kind=Member.KIND_ENGINE, incarnation=Incarnation(replica_id="e1", epoch=EPOCH)
        )

    async def Session(
        self, request_iterator: AsyncIterator[ClientFrame], context: Any
    ) -> AsyncIterator[EngineFrame]:
        self.num_sessions += 1
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self._outgoing.get()
        finally:
            reader.cancel()

    async def _read(self, frames: AsyncIterator[ClientFrame]) -> None:
        async for frame in frames:
            assert frame.ByteSize() <= 256 * 1024
            self.num_frames += 1
            self.adds += frame.adds
            self.parts += frame.parts
            self.credits += frame.credits
            self.asked += frame.probed
            self.cancels.update({cancel.stream_id: cancel.reason for cancel in frame.cancels})
            async with self._received:
                self._received.notify_all()

    async def die(self) -> None:
        await self._server.stop(grace=0)

    async def receives(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self._received:
            await self._received.wait_for(condition)

    async def add(self, number: int = 0) -> Add:
        """The request that came as that number."""
        await self.receives(lambda: len(self.adds) > number)
        return self.adds[number]

    def send(self, frame: EngineFrame) -> None:
        self._outgoing.put_nowait(frame)

    def send_tokens(self, rows: dict[int, Sequence[int]], first: int = 0, **columns: Any) -> None:
        """Row by row: the stream's tokens, the first of them being its output `first`."""
        token_ids = [token_id for row in rows.values() for token_id in row]
        self.send(
            EngineFrame(
                stream_ids=rows,
                first_index=[first] * len(rows),
                num_tokens=[len(row) for row in rows.values()],
                token_ids=token_ids,
                **columns,
            )
        )

    def send_finish(
        self, stream_id: int, reason: FinishReason.ValueType = FINISH_REASON_LENGTH, **fields: Any
    ) -> None:
        self.send(EngineFrame(finishes=[Finish(stream_id=stream_id, reason=reason, **fields)]))


@contextlib.asynccontextmanager
async def scripted_engine() -> AsyncIterator[ScriptedEngine]:
    server = grpc.aio.server(options=server_options())
    engine = ScriptedEngine(server)
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    engine.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield engine
    finally:
        await engine.die()


@dataclass
class Heard:
    """What a gateway has heard of one stream, which began (or was resumed) at `first` and
    `offset`."""

    first: int
    offset: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_bytes: int = 0
    """Of the text, content or not."""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish: OutputFinish | None = None


class ListeningGateway:
    """A session with an output processor; `heard` by stream id."""

    def __init__(self, call: Any, engine_address: str, model: str) -> None:
        self.call = call
        self.received: dict[int, Heard] = {}
        self.frames: list[OutputFrame] = []
        self._engine_address = engine_address
        self._model = model

    def opening(
        self, *stream_ids: int, epoch: int = EPOCH, delivered: Sequence[int] = (), **add: Any
    ) -> Open:
        sampling = add.pop("sampling", Sampling())
        answer_format = add.pop("answer_format", None)
        prompt_ids = add.pop("prompt_ids", [5, 6])
        fields = {
            "num_prompt_tokens": len(prompt_ids),
            "credit": 1 << 20,
            "eos_token_ids": [2, 0],
            **add,
        }
        request = Add(stream_ids=stream_ids, prompt_ids=prompt_ids, sampling=sampling, **fields)
        return Open(
            engine_address=self._engine_address,
            replica_id="e1",
            epoch=epoch,
            model=self._model,
            add=request,
            delivered_bytes=delivered,
            answer_format=answer_format,
        )

    async def send(self, *opens: Open, **columns: Any) -> None:
        await self.call.write(GatewayFrame(opens=opens, **columns))

    async def read(self) -> OutputFrame:
        async with asyncio.timeout(60):
            frame = await self.call.read()
        assert frame is not grpc.aio.EOF
        assert frame.ByteSize() <= 256 * 1024
        self._take(frame)
        return frame

    def _take(self, frame: OutputFrame) -> None:
        self.frames.append(frame)
        position = 0
        parts = {part.row: part for part in frame.parts}
        rows = zip(
            frame.stream_ids,
            frame.first_index,
            frame.num_tokens,
            frame.texts,
            frame.text_offset,
            strict=True,
        )
        for row, (stream_id, first, count, text, offset) in enumerate(rows):
            received = self.received.setdefault(stream_id, Heard(first, offset))
            assert first == received.first + len(received.token_ids)
            assert offset == received.offset + received.num_bytes
            received.token_ids += frame.token_ids[position : position + count]
            received.text += text
            received.num_bytes += parts[row].num_bytes if row in parts else len(text.encode())
            if row in parts:
                received.reasoning += parts[row].reasoning
                received.calls += parts[row].tool_calls
            position += count
        assert position == len(frame.token_ids)
        for finish in frame.finishes:
            self.received.setdefault(finish.stream_id, Heard(0, 0)).finish = finish

    async def finish(self, stream_id: int) -> OutputFinish:
        """Reads until the stream has ended."""
        while (received := self.received.get(stream_id)) is None or received.finish is None:
            await self.read()
        return received.finish


@contextlib.asynccontextmanager
async def listening_gateway(
    output_processor: str,
    engine: ScriptedEngine,
    model: str,
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[ListeningGateway]:
    async with grpc.aio.insecure_channel(output_processor) as channel:
        call = output_processor_pb2_grpc.OutputProcessorStub(channel).Session(
            metadata=tuple(metadata)
        )
        try:
            yield ListeningGateway(call, engine.address, model)
        finally:
            call.cancel()
