"""A peer that falls silent is noticed: what runs over the connection ends, and says that it may be
tried again."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import grpc
import pytest

from headwater.gateway.stages.output_session import OutputSession
from headwater.gateway.stages.output_sessions import OutputSessions
from headwater.proto import output_processor_pb2_grpc
from headwater.proto.common_pb2 import FINISH_REASON_ERROR
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.runtime import channel
from headwater.services.runtime.errors import HeadwaterError, Unavailable
from headwater.services.runtime.listener import Listener
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import ListeningGateway, scripted_engine


class Relay:
    """Between a client and a server at `target`, until it stops forwarding; the connections stay
    open."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._forwarders: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        reader_there, writer_there = await asyncio.open_connection(host, int(port))
        self._writers += [writer, writer_there]
        for source, sink in ((reader, writer_there), (reader_there, writer)):
            self._forwarders.append(asyncio.create_task(forward(source, sink)))

    def stop_forwarding(self) -> None:
        for task in self._forwarders:
            task.cancel()

    def close(self) -> None:
        self.stop_forwarding()
        for writer in self._writers:
            writer.transport.abort()


async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            sink.write(data)


@contextlib.asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    relay.address = f"{host}:{port}"
    try:
        yield relay
    finally:
        server.close()
        relay.close()
        # Transports close in the loop's next turn.
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PING_SECONDS", 0.4)
    # The relay is in the tests' own process, which a busy machine may let wait.
    monkeypatch.setattr(channel, "PONG_SECONDS", 6.0)


@contextlib.asynccontextmanager
async def output_processor(tokenizer: Tokenizer) -> AsyncIterator[str]:
    async with EngineLinks() as links:
        listener = Listener("127.0.0.1", 0)
        servicer = OutputProcessor({DEMO_NAME: tokenizer}, links)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        try:
            yield listener.address
        finally:
            await listener.server.stop(grace=0)


class Ended:
    """A stream's owner that waits for its end."""

    received_at = math.inf

    def __init__(self) -> None:
        self.error: asyncio.Future[HeadwaterError] = asyncio.get_running_loop().create_future()

    def receive(self, *_: object) -> None: ...
    def started(self, *_: object) -> None: ...
    def prompt_scored(self, *_: object) -> None: ...
    def finished(self, *_: object) -> None: ...
    def lost(self, error: HeadwaterError) -> None:
        self.error.set_result(error)


@contextlib.asynccontextmanager
async def gateway_session(address: str) -> AsyncIterator[OutputSession]:
    sessions = OutputSessions()
    sessions.join(address)
    session = sessions._sessions[address]
    try:
        await session.connected.wait()
        yield session
    finally:
        await sessions.close()


async def test_an_output_processor_that_falls_silent_ends_its_streams(
    demo_tokenizer: Tokenizer,
) -> None:
    async with (
        asyncio.timeout(60),
        scripted_engine() as engine,
        output_processor(demo_tokenizer) as address,
        relay_to(address) as relay,
        gateway_session(relay.address) as session,
    ):
        stream = Ended()
        session.open(ListeningGateway(None, engine.address, DEMO_NAME).opening(), [stream])
        numbers = list((await engine.add()).stream_ids)
        relay.stop_forwarding()
        error = await stream.error
        assert isinstance(error, Unavailable)
        assert error.code == "output_processor_unavailable"
        # And the other side gives up whom it cannot reach: the engine need not go on.
        await engine.receives(lambda: engine.cancels == dict.fromkeys(numbers, "gateway_gone"))


async def test_an_engine_that_falls_silent_ends_its_streams(demo_tokenizer: Tokenizer) -> None:
    async with (
        asyncio.timeout(60),
        scripted_engine() as engine,
        relay_to(engine.address) as relay,
        output_processor(demo_tokenizer) as address,
        grpc.aio.insecure_channel(address) as there,
    ):
        call = output_processor_pb2_grpc.OutputProcessorStub(there).Session()
        gateway = ListeningGateway(call, relay.address, DEMO_NAME)
        await gateway.send(gateway.opening(1))
        await engine.add()
        relay.stop_forwarding()
        finish = await gateway.finish(1)
        assert (finish.reason, finish.error, finish.retriable) == (
            FINISH_REASON_ERROR,
            "engine e1 is gone",
            True,
        )
        call.cancel()
