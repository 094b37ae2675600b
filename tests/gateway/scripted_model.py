"""An engine that answers each request with the next text of a script: a model whose answers a test
knows, behind real stages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from headwater.proto import engine_pb2_grpc, processor_pb2, processor_pb2_grpc
from headwater.proto.common_pb2 import FINISH_REASON_STOP
from headwater.proto.engine_pb2 import EngineFrame, Start
from headwater.services.text.tokenizer import Tokenizer
from tests.gateway.scripted_output import NamedEngine
from tests.services.output_processor.scripted_engine import ScriptedEngine

STEP_TOKENS = 8


class ScriptedModel(NamedEngine, ScriptedEngine):
    """The engine. `prompts` are those of the requests so far."""

    def __init__(
        self, server: grpc.aio.Server, address: str, model: Any, script: Sequence[list[int]]
    ) -> None:
        NamedEngine.__init__(self, "e1", address, model)
        ScriptedEngine.__init__(self, server)
        self._script = script

    async def receives(self, condition: Callable[[], bool]) -> None:
        """Waits as long as the client takes for its next request."""
        async with self._received:
            await self._received.wait_for(condition)

    async def answer(self) -> None:
        """Answers the requests, in the order in which they come."""
        for number, token_ids in enumerate(self._script):
            add = await self.add(number)
            await self.receives(lambda add=add: len(self._prompt(add)) == add.num_prompt_tokens)  # type: ignore[misc]
            [stream_id] = add.stream_ids
            self.send(EngineFrame(starts=[Start(stream_id=stream_id)]))
            for first in range(0, len(token_ids), STEP_TOKENS):
                self.send_tokens({stream_id: token_ids[first : first + STEP_TOKENS]}, first=first)
            self.send_finish(stream_id, FINISH_REASON_STOP)

    def prompt(self, number: int) -> list[int]:
        return self._prompt(self.adds[number])

    def _prompt(self, add: Any) -> list[int]:
        more = [
            token_id
            for part in self.parts
            if part.stream_id == add.stream_ids[0]
            for token_id in part.prompt_ids
        ]
        return [*add.prompt_ids, *more]


@contextlib.contextmanager
def scripted_model(
    processor: str, tokenizer: Tokenizer, script: Sequence[str]
) -> Iterator[tuple[ScriptedModel, str]]:
    """The engine of the processor's model, in a thread of its own, and its address."""
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in script]
    started = threading.Event()
    running: list[Any] = []

    async def serve() -> None:
        async with grpc.aio.insecure_channel(processor) as channel:
            stub: Any = processor_pb2_grpc.ProcessorStub(channel)
            asked = processor_pb2.ProcessorModelsRequest()
            [model] = (await stub.ListModels(asked, wait_for_ready=True)).models
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        engine = ScriptedModel(server, address, model, answers)
        engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
        await server.start()
        over = asyncio.Event()
        running[:] = [engine, address, asyncio.get_running_loop(), over]
        started.set()
        answering = asyncio.create_task(engine.answer())
        await over.wait()
        answering.cancel()
        await engine.die()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60), "the engine did not start"
        engine, address, loop, over = running
        yield engine, address
        loop.call_soon_threadsafe(over.set)
    finally:
        thread.join(60)
