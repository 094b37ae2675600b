"""An output processor between a scripted engine and a listening gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from headwater.proto import output_processor_pb2_grpc
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.runtime.listener import Listener
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import (
    ListeningGateway,
    ScriptedEngine,
    listening_gateway,
    scripted_engine,
)


@dataclass
class Line:
    """An output processor between a scripted engine and a listening gateway."""

    servicer: OutputProcessor
    address: str
    engine: ScriptedEngine
    gateway: ListeningGateway
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def open(self, *stream_ids: int, **fields: object) -> list[int]:
        """Sends a request; returns the numbers that the engine knows its streams by."""
        num_adds = len(self.engine.adds)
        await self.gateway.send(self.gateway.opening(*stream_ids, **fields))  # type: ignore[arg-type]
        return list((await self.engine.add(num_adds)).stream_ids)


@pytest.fixture
async def line(demo_tokenizer: Tokenizer) -> AsyncIterator[Line]:
    async with scripted_engine() as engine, EngineLinks() as links:
        servicer = OutputProcessor({DEMO_NAME: demo_tokenizer}, links)
        listener = Listener("127.0.0.1", 0)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        async with listening_gateway(listener.address, engine, DEMO_NAME) as gateway:
            yield Line(servicer, listener.address, engine, gateway, demo_tokenizer)
        await listener.server.stop(grace=0)
