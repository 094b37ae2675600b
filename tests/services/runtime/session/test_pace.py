"""Hundreds of streams whose readers take nothing: what is on its way is a moment's work, not all
their credit."""

from __future__ import annotations

from collections import Counter

import pytest

from headwater.proto import output_processor_pb2_grpc
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.session.pace import LEAST_AHEAD, TOKENS_AHEAD, Pace
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import (
    ListeningGateway,
    listening_gateway,
    scripted_engine,
)

CREDIT = 1024


def test_few_streams_have_all_their_credit_at_once() -> None:
    pace = Pace()
    assert pace.open([1, 2], CREDIT) == CREDIT
    assert pace.granted(1, 256) == 256
    assert pace.open([3], 5) == 5


def test_many_streams_have_a_share_each_and_more_as_their_tokens_leave() -> None:
    pace = Pace()
    numbers = range(TOKENS_AHEAD // LEAST_AHEAD)
    assert pace.open(numbers, CREDIT) == LEAST_AHEAD
    assert pace.on_delivered(0, LEAST_AHEAD // 2 - 1) == 0
    assert pace.on_delivered(0, 1) == LEAST_AHEAD // 2
    assert pace.granted(1, 1) == 0
    assert pace.on_delivered(1, LEAST_AHEAD) == LEAST_AHEAD


def test_no_credit_is_lost_or_made_and_no_stream_stands_still() -> None:
    pace = Pace()
    given = dict.fromkeys(range(600), pace.open(range(600), CREDIT))
    reported = Counter[int]()
    while any(reported[number] < CREDIT + 100 for number in given):
        for number in given:
            assert given[number] > reported[number], "it has used its credit and gets no more"
            given[number] += pace.granted(number, 100) if not reported[number] else 0
            reported[number] += (step := min(7, given[number] - reported[number]))
            given[number] += pace.on_delivered(number, step)
            assert given[number] - reported[number] <= LEAST_AHEAD
    assert set(given.values()) == {CREDIT + 100}


def test_a_stream_that_is_not_paced_has_what_it_was_granted() -> None:
    pace = Pace()
    assert (pace.granted(9, 50), pace.on_delivered(9, 50)) == (50, 0)
    pace.open([9], CREDIT)
    pace.forget(9)
    assert pace.granted(9, 50) == 50


@pytest.mark.parametrize("resumable", [False, True])
async def test_the_engine_of_300_streams_computes_no_further_ahead_than_a_gateway_grants(
    demo_tokenizer: Tokenizer, resumable: bool
) -> None:
    async with scripted_engine() as engine, EngineLinks() as links:
        servicer = OutputProcessor({DEMO_NAME: demo_tokenizer}, links)
        listener = Listener("127.0.0.1", 0)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        async with (
            open_channel(listener.address) as channel,
            listening_gateway(listener.address, engine, DEMO_NAME) as reader,
        ):
            stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
            call = stub.Session()
            deaf = ListeningGateway(call, engine.address, DEMO_NAME)
            opening = deaf.opening(*range(1, 301), credit=CREDIT)
            opening.resumable = resumable
            await deaf.send(opening)
            add = await engine.add()
            # One that goes on without any gateway is not held to one's pace.
            assert add.credit == (CREDIT if resumable else LEAST_AHEAD)
            left = dict.fromkeys(add.stream_ids, add.credit)
            if not resumable:
                # As fast as an engine can, until their credit is used: they get as much again, not
                # all.
                engine.send_tokens({number: [500] * LEAST_AHEAD for number in left})
                await engine.receives(lambda: len(engine.credits) >= len(left))
                assert {credit.tokens for credit in engine.credits} == {LEAST_AHEAD}
            # A neighbour is served meanwhile.
            await reader.send(reader.opening(1, credit=10))
            [number] = (await engine.add(1)).stream_ids
            engine.send_tokens({number: [500]})
            engine.send_finish(number)
            await reader.finish(1)
            assert reader.received[1].token_ids == [500]
            call.cancel()
        await listener.server.stop(grace=0)
