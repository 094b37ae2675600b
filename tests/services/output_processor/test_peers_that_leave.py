"""Engines and gateways that an output processor loses, that do not answer, or that are not the ones
meant."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headwater.proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    LOSS_CAUSE_MISSING,
    LOSS_CAUSE_SILENT,
)
from headwater.proto.engine_pb2 import (
    EngineFrame,
)
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.runtime.session import silence
from tests.services.output_processor.conftest import Line
from tests.services.output_processor.scripted_engine import (
    listening_gateway,
)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is asked after 60 ms of silence and lost after two seconds. A busy machine may need a
    second to answer."""
    monkeypatch.setattr(silence, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(silence, "LOST_TICKS", 200)


async def test_an_engine_that_is_gone_ends_its_streams_so_that_they_can_be_retried(
    line: Line,
) -> None:
    await line.open(1)
    await line.engine.die()
    finish = await line.gateway.finish(1)
    assert (finish.reason, finish.error, finish.retriable) == (
        FINISH_REASON_ERROR,
        "engine e1 is gone",
        True,
    )


@pytest.mark.usefixtures("short_silence")
async def test_an_engine_that_says_nothing_when_it_is_asked_loses_its_streams(line: Line) -> None:
    [number] = await line.open(1)
    await line.engine.receives(lambda: number in line.engine.asked)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable, finish.cause) == (
        "engine e1 is silent",
        True,
        LOSS_CAUSE_SILENT,
    )


@pytest.mark.usefixtures("short_silence")
async def test_an_engine_that_has_nothing_to_say_but_answers_keeps_its_streams(line: Line) -> None:
    [number] = await line.open(1)
    loop = asyncio.get_running_loop()
    enough = loop.time() + 1.5 * silence.LOST_TICKS * silence.TICK_SECONDS
    while loop.time() < enough:
        num_asked = len(line.engine.asked)
        await line.engine.receives(lambda count=num_asked: len(line.engine.asked) > count)  # type: ignore[misc]
        line.engine.send(EngineFrame(answered=True))
    line.engine.send_finish(number)
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_LENGTH


async def test_an_engine_that_was_never_there_is_gone(line: Line) -> None:
    opening = line.gateway.opening(1)
    opening.engine_address = "127.0.0.1:1"
    await line.gateway.send(opening)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("engine e1 is gone", True)


async def test_another_incarnation_than_the_one_meant_refuses(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1, epoch=8))
    finish = await line.gateway.finish(1)
    assert finish.error.startswith("engine e1 is gone: another one answers at 127.0.0.1:")
    assert finish.retriable
    assert line.engine.adds == []


async def test_streams_of_a_gateway_that_left_are_cancelled_at_their_engine(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as other:
        await other.send(other.opening(1))
        [number] = (await line.engine.add()).stream_ids
    await line.engine.receives(lambda: line.engine.cancels == {number: "gateway_gone"})


async def test_a_gateway_that_does_not_read_stalls_no_other(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as deaf:
        await deaf.send(deaf.opening(1))
        deaf_number = (await line.engine.add()).stream_ids[0]
        [number] = await line.open(1)
        word = line.ids(" hello") * 250
        for i in range(400):
            line.engine.send_tokens({deaf_number: word}, first=i * 250)
            line.engine.send_tokens({number: word[:1]}, first=i)
        line.engine.send_finish(number)
        await line.gateway.finish(1)
        assert line.gateway.received[1].text == " hello" * 400
        line.engine.send_finish(deaf_number)
        await deaf.finish(1)
        assert deaf.received[1].text == " hello" * 250 * 400


async def test_a_model_without_tokenizer_here_is_refused(line: Line) -> None:
    opening = line.gateway.opening(1)
    opening.model = "nobody"
    await line.gateway.send(opening)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("the model 'nobody' has no tokenizer here", False)


async def test_a_stream_id_that_is_taken_stays_with_its_stream(line: Line) -> None:
    [number] = await line.open(1)
    await line.gateway.send(line.gateway.opening(1, 2))
    assert (await line.gateway.finish(2)).error == "stream ids are taken"
    line.engine.send_tokens({number: line.ids("still here")})
    line.engine.send_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == "still here"


async def test_leaving_refuses_new_streams_and_ends_the_session_with_the_last_one(
    line: Line,
) -> None:
    [number] = await line.open(1)
    line.servicer.leave()
    await line.gateway.send(line.gateway.opening(2))
    refused = await line.gateway.finish(2)
    assert (refused.error, refused.retriable) == ("the output processor is leaving", True)
    line.engine.send_tokens({number: line.ids("to the end")})
    line.engine.send_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == "to the end"
    assert await line.gateway.call.read() is grpc.aio.EOF


async def test_streams_that_are_asked_for_are_asked_for_on_the_way_or_end_as_missing(
    line: Line,
) -> None:
    [number] = await line.open(1)
    await line.gateway.send(probed=[1, 7])
    finish = await line.gateway.finish(7)
    assert any(frame.answered for frame in line.gateway.frames)
    assert (finish.retriable, finish.cause) == (True, LOSS_CAUSE_MISSING)
    await line.engine.receives(lambda: line.engine.asked == [number])
    line.engine.send_finish(number, FINISH_REASON_ERROR, retriable=True, cause=LOSS_CAUSE_MISSING)
    assert (await line.gateway.finish(1)).cause == LOSS_CAUSE_MISSING
