"""How an engine ends: drained, without its core, or without its server. Nothing outlives it, and
each stream ends with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import grpc
import pytest

from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import LOSS_CAUSE_HANDED_OVER, LOSS_CAUSE_MISSING
from tests.gateway.processes import launched
from tests.services.engine.engine_process import (
    add,
    answer,
    client_of,
    engine_process,
    prompt,
    wait_for_end,
)
from tests.shared_memory import shared_memory_of

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
ERROR = common_pb2.FINISH_REASON_ERROR


async def test_when_the_core_is_killed_streams_end_retriable_and_the_door_ends_too() -> None:
    with engine_process(start=launched) as engine:
        async with client_of(engine) as client:
            await client.send(*(add(i, prompt(i), 1000, credit=3) for i in range(10)))
            await client.read_tokens(9, 3)
            os.kill(engine.core_pid, signal.SIGKILL)
            await client.read_until_finished(*range(10))
            assert {(f.reason, f.error, f.retriable) for f in client.finishes.values()} == {
                (ERROR, "the engine core has ended", True)
            }
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await client.call.read()
        assert engine.wait() == 1
        assert "headwater engine: the engine core ended with status -9" in engine.close()


@pytest.mark.parametrize("how", ["killed", pytest.param("supervisor lost", marks=pytest.mark.long)])
async def test_nothing_outlives_a_door(how: str) -> None:
    with engine_process(start=launched) as engine:
        core = engine.core_pid
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 1000, credit=3))
            await client.read_tokens(1, 3)
            named = shared_memory_of(engine.pid, core)
            if how == "killed":
                engine.process.kill()
            else:
                engine.lose_supervisor()
            await asyncio.to_thread(engine.wait, 60)
            await asyncio.to_thread(wait_for_end, core, 60)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.call.read()
    assert [path for path in named if path.exists()] == []


async def test_on_sigterm_what_runs_ends_and_nothing_new_is_taken() -> None:
    with engine_process("--drain-limit=60") as engine:
        core = engine.core_pid
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 200, credit=3))
            await client.read_tokens(1, 3)
            engine.terminate()
            await client.load_that(lambda load: load.draining)
            await client.send(add(2, prompt(2)))
            await client.read_until_finished(2)
            refused = client.finishes[2]
            assert (refused.reason, refused.error, refused.retriable) == (ERROR, "draining", True)
            await client.send(credits=[pb.Credit(stream_id=1, tokens=1000)])
            await client.read_until_finished(1)
            assert client.tokens[1] == answer(prompt(1), 200)
            assert await client.call.read() is grpc.aio.EOF
        assert await asyncio.to_thread(engine.wait) == 0
        wait_for_end(core, 0)


async def test_a_drain_over_grpc_cuts_off_what_does_not_end_in_time() -> None:
    with engine_process() as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 200, credit=3), add(2, prompt(2), 3))
            await client.read_until_finished(2)
            reply = await client.stub.Drain(pb.DrainRequest(limit_ms=200))
            assert (reply.num_finished, reply.num_cancelled) == (0, 1)
            await client.read_until_finished(1)
            finish = client.finishes[1]
            assert (finish.reason, finish.error, finish.retriable) == (CANCELLED, "draining", True)
            assert finish.cause == LOSS_CAUSE_HANDED_OVER
        assert await asyncio.to_thread(engine.wait) == 0


async def test_on_sigterm_what_would_not_end_in_time_is_handed_over_at_once_and_goes_on_elsewhere() -> (
    None
):
    """And streams that run, wait or have no credit are not missing, whoever asks."""
    with engine_process(
        "--simulated-step-seconds=0.01", "--drain-limit=35", "--max-num-seqs=2"
    ) as engine:
        async with client_of(engine) as client:
            long = prompt(1)
            short = prompt(2)
            await client.send(
                add(1, long, 3900), add(2, short, 300), add(3, prompt(3), 8), probed=[1, 2, 3, 4]
            )
            await client.read_tokens(2, 20)
            await client.send(probed=[1, 2, 3])
            assert {each: finish.cause for each, finish in client.finishes.items()} == {
                4: LOSS_CAUSE_MISSING
            }
            engine.terminate()
            await client.read_until_finished(1)
            assert 2 not in client.finishes
            handed_over = client.finishes[1]
            assert (handed_over.retriable, handed_over.cause) == (True, LOSS_CAUSE_HANDED_OVER)
            assert handed_over.num_output_tokens == len(client.tokens[1])
            await client.read_until_finished(2, 3)
            assert (client.tokens[2], client.tokens[3]) == (
                answer(short, 300),
                answer(prompt(3), 8),
            )
        assert await asyncio.to_thread(engine.wait) == 0
    assert client.tokens[1] == answer(long, 3000)[: len(client.tokens[1])]
