from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headwater.gateway.stages.prepare_session import MAX_CALL_BYTES, MAX_FRAME_BYTES
from headwater.gateway.stages.processors import Processors
from headwater.proto import processor_pb2_grpc
from headwater.proto.common_pb2 import Sampling, StructuredOutput
from headwater.proto.processor_pb2 import (
    PrepareFrame,
    PrepareReply,
    PrepareRequest,
    ProcessorModelsReply,
    ProcessorModelsRequest,
    Prompt,
)
from headwater.services.grammars.checker import GrammarChecker
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.processor.__main__ import Processor, WorkThreads
from headwater.services.runtime import errors
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.tracing import NoSpan
from headwater.services.text.model import TextModel
from tests.free_ports import free_port

REFUSED = [
    ({"temperature": 3.0}, errors.BadRequest, "temperature", "temperature is 3.0; allowed: 0…2"),
    (
        {"structured_output": StructuredOutput(regex="(")},
        errors.BadRequest,
        "structured_output.regex",
        "cannot be followed",
    ),
]


def request(text: str = "a river runs", **sampling: Any) -> PrepareRequest:
    return PrepareRequest(
        model=DEMO_NAME,
        prompt=Prompt(text=text),
        sampling=Sampling(**sampling),
        cache_namespace=bytes(16),
    )


class Counted(Processor):
    """Counts how it is asked."""

    num_calls = num_frames = 0

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareReply:
        self.num_calls += 1
        return await super().Prepare(request, context)

    async def PrepareSession(
        self, incoming: AsyncIterator[PrepareFrame], context: Any
    ) -> AsyncIterator[Any]:
        async def counted() -> AsyncIterator[PrepareFrame]:
            async for frame in incoming:
                self.num_frames += 1
                yield frame

        async for frame in super().PrepareSession(counted(), context):
            yield frame


class Sessionless(Counted):
    """As processors were before they had sessions."""

    async def PrepareSession(
        self, incoming: AsyncIterator[PrepareFrame], context: Any
    ) -> AsyncIterator[Any]:
        # Whoever asks may know the models before it knows this.
        await asyncio.sleep(0.05)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        yield


class Deadly(Counted):
    """Dies of whatever it is asked."""

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareReply:
        self.num_calls += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        raise AssertionError("abort returned")

    async def PrepareSession(
        self, incoming: AsyncIterator[PrepareFrame], context: Any
    ) -> AsyncIterator[Any]:
        async for _ in incoming:
            self.num_frames += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield


class Renamed(Counted):
    """A processor that serves its model under another name."""

    async def ListModels(
        self, request: ProcessorModelsRequest, context: Any
    ) -> ProcessorModelsReply:
        (model,) = (await super().ListModels(request, context)).models
        model.name = "renamed"
        return ProcessorModelsReply(models=[model])


class Stage:
    def __init__(self, servicer: Counted, port: int = 0) -> None:
        self.servicer = servicer
        self.listener = Listener("127.0.0.1", port)
        processor_pb2_grpc.add_ProcessorServicer_to_server(servicer, self.listener.server)


@pytest.fixture
async def stages(demo_model: TextModel) -> AsyncIterator[tuple[Stage, Stage]]:
    """One with sessions and one without."""
    with contextlib.closing(WorkThreads(1)) as threads:
        async with GrammarChecker() as checker:
            both = (
                Stage(Counted([demo_model], threads, checker)),
                Stage(Sessionless([demo_model], threads, checker)),
            )
            for stage in both:
                await stage.listener.start()
            yield both
            for stage in both:
                await stage.listener.server.stop(grace=0)


@pytest.fixture
async def processors() -> AsyncIterator[Processors]:
    pool = Processors()
    yield pool
    await pool.close()


async def joined(processors: Processors, stage: Stage, *, by_session: bool = True) -> None:
    processors.join(stage.listener.address)
    async with asyncio.timeout(60):
        while not processors.models() or (by_session and not _sessions(processors)):  # noqa: ASYNC110 (a network)
            await asyncio.sleep(0.01)


def _sessions(processors: Processors) -> int:
    return sum(processor.session.is_open for processor in processors._pool.values())


async def test_requests_share_frames_and_are_answered_as_calls_are(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    stage, _ = stages
    await joined(processors, stage)
    asked = [request(f"river {i}" * (1 + i % 7), max_tokens=i + 1) for i in range(200)]
    replies = await asyncio.gather(*(processors.prepare(each, NoSpan()) for each in asked))
    assert stage.servicer.num_calls == 0
    assert stage.servicer.num_frames < 20
    async with grpc.aio.insecure_channel(stage.listener.address) as channel:
        stub = processor_pb2_grpc.ProcessorStub(channel)
        assert [await stub.Prepare(each) for each in asked[:20]] == replies[:20]
    assert [reply.sampling.max_tokens for reply in replies] == list(range(1, 201))
    for sampling, kind, param, output in REFUSED:
        with pytest.raises(kind, match=output) as refused:
            await processors.prepare(request(**sampling), NoSpan())
        assert refused.value.param == param


async def test_a_processor_that_was_restarted_at_its_address_may_serve_another_model(
    demo_model: TextModel, processors: Processors
) -> None:
    """A new container may get the address of an earlier one."""
    port = free_port()
    with contextlib.closing(WorkThreads(1)) as threads:
        async with GrammarChecker() as checker:
            for kind, name in ((Counted, DEMO_NAME), (Renamed, "renamed")):
                stage = Stage(kind([demo_model], threads, checker), port)
                await stage.listener.start()
                try:
                    processors.join(stage.listener.address)
                    async with asyncio.timeout(60):
                        while list(processors.models()) != [name]:  # noqa: ASYNC110 (a network)
                            await asyncio.sleep(0.01)
                finally:
                    await stage.listener.server.stop(grace=0)


async def test_a_long_request_and_a_processor_without_sessions_take_calls(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    with_sessions, without = stages
    await joined(processors, with_sessions)
    assert (
        await processors.prepare(
            request("river " * MAX_CALL_BYTES, truncate_prompt_tokens=100), NoSpan()
        )
    ).prompt_ids
    assert (with_sessions.servicer.num_calls, with_sessions.servicer.num_frames) == (1, 0)
    processors.leave(with_sessions.listener.address)
    await joined(processors, without, by_session=False)
    assert (await processors.prepare(request(), NoSpan())).prompt_ids
    assert without.servicer.num_calls == 1
    # A session counts as open until its refusal is read.
    async with asyncio.timeout(60):
        while _sessions(processors):  # noqa: ASYNC110 (a network)
            await asyncio.sleep(0.01)


async def test_a_lost_session_sends_its_requests_to_another_processor(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    lost, other = stages
    await joined(processors, lost)
    processors.join(other.listener.address)
    async with asyncio.timeout(60):
        while len([each for each in processors._pool.values() if each.models]) < 2:  # noqa: ASYNC110 (a network)
            await asyncio.sleep(0.01)
    slow = [request("Wörter über Wörter. " * 2500, truncate_prompt_tokens=100) for _ in range(8)]
    running = asyncio.gather(*(processors.prepare(each, NoSpan()) for each in slow))
    await asyncio.sleep(0.005)
    await lost.listener.server.stop(grace=0)
    assert len({tuple(reply.prompt_ids) for reply in await running}) == 1
    assert other.servicer.num_calls >= 4


async def test_a_request_waits_for_the_processor_that_follows_the_only_one(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    lost, next_one = stages
    await joined(processors, lost)
    await lost.listener.server.stop(grace=0)
    waiting = asyncio.create_task(processors.prepare(request(), NoSpan()))
    done, _ = await asyncio.wait((waiting,), timeout=0.3)
    assert not done
    processors.leave(lost.listener.address)
    assert not processors.models()
    processors.join(next_one.listener.address)
    assert (await waiting).prompt_ids
    assert next_one.servicer.num_calls == 1


async def test_a_request_that_processors_die_of_is_given_up_with_the_second(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    well, _ = stages
    deadly = [
        Stage(
            Deadly(
                list(well.servicer._models.values()), well.servicer._threads, well.servicer._checker
            )
        )
        for _ in range(3)
    ]
    try:
        for stage in deadly:
            await stage.listener.start()
            processors.join(stage.listener.address)
        async with asyncio.timeout(60):
            # A session may be open before the models are known. A processor gets frames when both
            # are there.
            while not all(  # noqa: ASYNC110 (a network)
                each.models and each.session.is_open for each in processors._pool.values()
            ):
                await asyncio.sleep(0.01)
        with pytest.raises(errors.Unavailable, match="the processor is gone"):
            await processors.prepare(request(), NoSpan())
        assert sum(stage.servicer.num_frames for stage in deadly) == 2
        assert sum(stage.servicer.num_calls for stage in deadly) == 0
    finally:
        for stage in deadly:
            await stage.listener.server.stop(grace=0)


async def test_a_leaving_processor_answers_what_it_was_asked(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    stage, _ = stages
    await joined(processors, stage)
    # All requests fit in one frame. A second frame might come after the first is answered and the
    # session is over.
    asked = [request("Wörter. " * 4500, truncate_prompt_tokens=100) for _ in range(4)]
    assert sum(each.ByteSize() for each in asked) < MAX_FRAME_BYTES
    running = asyncio.gather(*(processors.prepare(each, NoSpan()) for each in asked))
    async with asyncio.timeout(60):
        while not stage.servicer.num_frames:  # noqa: ASYNC110 (a network)
            await asyncio.sleep(0.001)
    stage.servicer.leave()
    processors.leave(stage.listener.address)
    assert all(reply.prompt_ids for reply in await running)
    assert stage.servicer.num_calls == 0


async def test_a_caller_that_leaves_is_not_waited_for(
    stages: tuple[Stage, Stage], processors: Processors
) -> None:
    stage, _ = stages
    await joined(processors, stage)
    gone = asyncio.create_task(
        processors.prepare(request("Wörter. " * 6000, truncate_prompt_tokens=100), NoSpan())
    )
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await processors.prepare(request(), NoSpan())).prompt_ids
