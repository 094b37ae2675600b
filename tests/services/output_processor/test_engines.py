"""The output processor before a real engine service: server, core and simulated executor in
processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from headwater.proto import engine_pb2_grpc, output_processor_pb2_grpc
from headwater.proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Sampling,
)
from headwater.proto.engine_pb2 import Cancel, InfoRequest
from headwater.proto.output_processor_pb2 import Open
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.runtime.listener import Listener
from headwater.services.text.tokenizer import Tokenizer
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)
from tests.services.output_processor.scripted_engine import ListeningGateway


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process("--replica-id=e1") as process:
        yield process


@pytest.fixture
async def gateway(demo_tokenizer: Tokenizer) -> AsyncIterator[ListeningGateway]:
    async with EngineLinks() as links:
        listener = Listener("127.0.0.1", 0)
        servicer = OutputProcessor({"simulated": demo_tokenizer}, links)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        async with grpc.aio.insecure_channel(listener.address) as channel:
            call = output_processor_pb2_grpc.OutputProcessorStub(channel).Session()
            yield ListeningGateway(call, "", "simulated")
        await listener.server.stop(grace=0)


async def opening(engine: EngineProcess, stream_id: int, seed: int, **fields: object) -> Open:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        info = await engine_pb2_grpc.EngineStub(channel).Info(InfoRequest())
    request = add(stream_id, prompt(seed), **fields)  # type: ignore[arg-type]
    incarnation = info.incarnation
    return Open(
        engine_address=engine.address,
        replica_id="e1",
        epoch=incarnation.epoch,
        model="simulated",
        add=request,
    )


async def test_sixty_four_streams_are_each_the_text_of_their_tokens(
    engine: EngineProcess, gateway: ListeningGateway, demo_tokenizer: Tokenizer
) -> None:
    for stream_id in range(1, 65):
        await gateway.send(await opening(engine, stream_id, stream_id, max_tokens=48))
    for stream_id in range(1, 65):
        finish = await gateway.finish(stream_id)
        expected = answer(prompt(stream_id), 48)
        assert gateway.received[stream_id].token_ids == expected
        assert gateway.received[stream_id].text == demo_tokenizer.decode(
            expected, skip_special_tokens=True
        )
        assert (finish.reason, finish.num_output_tokens) == (FINISH_REASON_LENGTH, 48)


async def test_a_stop_string_ends_the_engines_work_too(
    engine: EngineProcess, gateway: ListeningGateway, demo_tokenizer: Tokenizer
) -> None:
    text = demo_tokenizer.decode(answer(prompt(1), 400), skip_special_tokens=True)
    stop = text[60:70]
    sampling = Sampling(temperature=0.0, max_tokens=4000, stop=[stop])
    await gateway.send(await opening(engine, 1, 1, sampling=sampling, credit=4000))
    finish = await gateway.finish(1)
    assert (finish.reason, finish.stop_string) == (FINISH_REASON_STOP, stop)
    assert gateway.received[1].text == text[: text.index(stop)]
    async with client_of(engine) as client:
        await client.idle_load()


async def test_a_resumed_stream_has_the_text_of_an_undisturbed_one(
    engine: EngineProcess, gateway: ListeningGateway, demo_tokenizer: Tokenizer
) -> None:
    expected = answer(prompt(3), 64)
    half = demo_tokenizer.decode(expected[:20], skip_special_tokens=True).rstrip("\ufffd")
    request = await opening(
        engine, 1, 3, max_tokens=64, num_output_tokens=20, output_ids=expected[:20]
    )
    request.delivered_bytes.append(len(half.encode()))
    await gateway.send(request)
    finish = await gateway.finish(1)
    assert gateway.received[1].token_ids == expected[20:]
    assert half + gateway.received[1].text == demo_tokenizer.decode(
        expected, skip_special_tokens=True
    )
    assert finish.num_output_tokens == 64


async def test_cancelled_streams_leave_nothing_behind(
    engine: EngineProcess, gateway: ListeningGateway
) -> None:
    for stream_id in range(1, 101):
        await gateway.send(await opening(engine, stream_id, stream_id, max_tokens=4000, credit=64))
    await gateway.send(
        cancels=[Cancel(stream_id=stream_id, reason="client_gone") for stream_id in range(1, 101)]
    )
    for stream_id in range(1, 101):
        await gateway.finish(stream_id)
    async with client_of(engine) as client:
        await client.idle_load()


async def test_an_engine_that_is_killed_ends_its_streams_at_once(gateway: ListeningGateway) -> None:
    with engine_process("--replica-id=e1", "--simulated-step-seconds=0.01") as doomed:
        await gateway.send(await opening(doomed, 1, 1, max_tokens=4000))
        await gateway.read()
        os.kill(doomed.pid, signal.SIGKILL)
        finish = await gateway.finish(1)
    assert (finish.reason, finish.error, finish.retriable) == (
        FINISH_REASON_ERROR,
        "engine e1 is gone",
        True,
    )
