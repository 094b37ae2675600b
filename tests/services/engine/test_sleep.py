"""An engine's process that is called to sleep and to wake."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import LOSS_CAUSE_HANDED_OVER
from tests.services.engine.engine_process import add, answer, client_of, engine_process, prompt

FLAGS = ("--takes-turns", "--kv-swap-memory=1000000", "--simulated-step-seconds=0.005")


async def test_a_stream_goes_on_behind_a_sleep() -> None:
    with engine_process(*FLAGS) as engine:
        async with client_of(engine) as client:
            # Without credit it is not over before the engine sleeps.
            await client.send(add(1, prompt(1), 200, credit=3))
            await client.read_tokens(1, 3)
            slept = await client.stub.Sleep(pb.SleepRequest())
            load = await client.load()
            assert slept.num_bytes == load.num_released_bytes == load.num_releasable_bytes > 0
            assert (load.sleep_state, load.num_running, load.num_waiting) == ("asleep", 0, 1)
            await client.send(add(2, prompt(2), 20))
            await client.load_that(lambda load: load.num_waiting == 2)
            await client.stub.Wake(pb.WakeRequest())
            assert (await client.load()).sleep_state == "awake"
            await client.send(credits=[pb.Credit(stream_id=1, tokens=1000)])
            await client.read_until_finished(1, 2)
            assert client.tokens[1] == answer(prompt(1), 200)
            assert client.tokens[2] == answer(prompt(2), 20)
            assert client.finishes[1].work.preemptions == 1


async def test_a_call_to_sleep_gives_way_to_a_later_one_to_wake() -> None:
    with engine_process(*FLAGS) as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 100))
            asleep = asyncio.ensure_future(client.stub.Sleep(pb.SleepRequest()))
            # The call has reached the engine, whose core may have taken it or not.
            await client.load()
            await client.stub.Wake(pb.WakeRequest())
            assert (await client.load()).sleep_state == "awake"
            # The core may have slept in between.
            await asyncio.wait((asleep,))
            await client.read_until_finished(1)
            assert client.tokens[1] == answer(prompt(1), 100)


async def test_an_engine_that_sleeps_hands_its_streams_over_at_once_when_it_drains() -> None:
    with engine_process(*FLAGS, "--drain-limit=60") as engine:
        async with client_of(engine) as client, asyncio.timeout(60):
            await client.send(add(1, prompt(1), 200))
            await client.read_tokens(1, 3)
            await client.stub.Sleep(pb.SleepRequest())
            engine.terminate()
            await client.read_until_finished(1)
            finish = client.finishes[1]
            assert (finish.retriable, finish.cause) == (True, LOSS_CAUSE_HANDED_OVER)


async def test_an_engine_that_keeps_its_memory_does_not_sleep() -> None:
    with engine_process() as engine:
        async with client_of(engine) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="takes_turns is false; allowed: true"):
                await client.stub.Sleep(pb.SleepRequest())
            assert (await client.load()).sleep_state == "awake"
