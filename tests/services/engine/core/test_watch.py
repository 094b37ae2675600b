"""A core that hangs is killed, whether it serves or still starts; one that is slow or idle is
not."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable

import pytest

from headwater.engine_core.step_output import EngineLoad
from headwater.proto.common_pb2 import FINISH_REASON_ERROR
from headwater.services.engine.core.client import CoreClient, CoreFailed
from headwater.services.engine.core.messages import Cancel, Idle, Ready, Sleep, Waiting, Wake
from headwater.services.engine.core.watch import MOVING_SECONDS, PATIENCE, CoreWatch
from headwater.services.engine.settings import EngineSettings
from headwater.services.stack.engine_calls import CALL_SECONDS
from tests.services.engine.engine_process import add, client_of, engine_process, prompt


def idle(watch: CoreWatch) -> None:
    watch.on_message(is_idle=True)


def asked(watch: CoreWatch) -> None:
    watch.on_message(is_idle=True)
    watch.commanded()


def answering(watch: CoreWatch) -> None:
    watch.on_message(is_idle=False, step_seconds=0.01)


def slow(watch: CoreWatch) -> None:
    watch.is_hung_after(3)
    watch.on_message(is_idle=False, step_seconds=3.0)


def paused(watch: CoreWatch) -> None:
    watch.on_message(is_idle=False, step_seconds=3600.0)


@pytest.mark.parametrize(
    ("last", "allowed"), [(idle, math.inf), (asked, 5), (answering, 5), (slow, 30), (paused, 10)]
)
def test_silence_counts_from_a_command_to_the_cores_next_message(
    last: Callable[[CoreWatch], None], allowed: float
) -> None:
    watch = CoreWatch(limit=5)
    watch.started(longest_step=2)
    last(watch)
    assert [watch.is_hung_after(1) for _ in range(40)] == [
        second > allowed for second in range(1, 41)
    ]


def test_a_start_may_be_silent_for_longer_and_no_limit_is_for_ever() -> None:
    starting = CoreWatch(limit=5)
    unlimited = CoreWatch(limit=0)
    assert [starting.is_hung_after(5 * PATIENCE), starting.is_hung_after(1)] == [False, True]
    assert not unlimited.is_hung_after(1e6)


def test_a_core_may_be_in_a_step_for_twice_as_long_as_steps_take() -> None:
    watch = CoreWatch(30)
    watch.started(longest_step=4.0)
    watch.commanded()
    for seconds, may_be_in_step in ((8, True), (1, True), (1, False)):
        assert not watch.is_hung_after(seconds)
        assert watch.may_be_in_step is may_be_in_step
    watch.on_message(is_idle=False)
    assert watch.may_be_in_step


async def test_a_core_that_gets_a_command_while_it_reports_that_it_is_idle_owes_a_message() -> None:
    link = CoreClient(hang_limit=5)
    link._take(Ready("", "", 0, "", 16, EngineLoad(), 1, 1, 1, longest_step=0))
    link._take(Idle(EngineLoad(), num_commands=0))
    assert not link._watch.is_hung_after(6)
    link.send(Cancel([1]))
    link._take(Idle(EngineLoad(), num_commands=0))
    assert link._watch.is_hung_after(6)
    link._take(Idle(EngineLoad(), num_commands=1))
    assert not link._watch.is_hung_after(6)
    await link._stop()


async def test_a_core_that_waits_for_blocks_is_neither_hung_nor_idle() -> None:
    link = CoreClient(hang_limit=5)
    link._take(Ready("", "", 0, "", 16, EngineLoad(), 1, 1, 1, longest_step=0))
    link.send(Cancel([1]))
    assert not link._watch.is_hung_after(4)
    link._take(Waiting(EngineLoad(num_waiting=1)))
    assert (link.load.num_waiting, link._watch.is_hung_after(4)) == (1, False)
    assert link._watch.is_hung_after(2)
    await link._stop()


async def test_a_core_that_moves_memory_may_be_silent_for_as_long_as_calls_wait() -> None:
    assert CALL_SECONDS == MOVING_SECONDS
    link = CoreClient(hang_limit=5)
    link._take(Ready("", "", 0, "", 16, EngineLoad(), 1, 1, 1, longest_step=0))
    for call, command, state in ((1, Sleep, "asleep"), (2, Wake, "awake")):
        link.send(command(call))
        link._take(Waiting(EngineLoad(sleep_state="falling asleep", sleep_call=call)))
        assert not link._watch.is_hung_after(MOVING_SECONDS)
        link._take(Waiting(EngineLoad(sleep_state=state, sleep_call=call - 1)))
        assert not link._watch.is_hung_after(6)
        link._take(Waiting(EngineLoad(sleep_state=state, sleep_call=call)))
        assert link._watch.is_hung_after(6)
    await link._stop()


async def test_an_engine_whose_core_hangs_ends_its_streams_and_itself() -> None:
    with engine_process("--hang-limit=3", "--simulated-step-seconds=0.01") as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 4000))
            await client.read_tokens(1, 5)
            os.kill(engine.core_pid, signal.SIGSTOP)
            await client.read_until_finished(1)
            assert client.finishes[1].reason == FINISH_REASON_ERROR
            assert await asyncio.to_thread(engine.wait, 60) != 0
        assert "the engine core hangs" in engine.close()


async def test_a_core_that_hangs_while_it_starts_has_failed() -> None:
    settings = EngineSettings(executor="simulated", served_model_name="some", hang_limit=0.1)
    async with CoreClient.running(settings) as core:
        os.kill(core.pid, signal.SIGSTOP)
        with pytest.raises(CoreFailed):
            await asyncio.wait_for(core.ready(), 60)
