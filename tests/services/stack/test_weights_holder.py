"""The process that holds an engine's weights: it outlives the engine, and ends with its stage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from headwater.engine_core.system.held_memory import HeldMemory, MemoryHolder
from headwater.services.engine.core.variables import WEIGHTS_HOLDER_FD
from headwater.services.runtime.forked import ForkClient, fork_server
from headwater.services.stack.settings import StackSettings
from headwater.services.stack.stage_process import StageProgram
from headwater.services.stack.weights_holder import WeightsHolder, holds_weights

GUARD_SECONDS = 60
ENGINE = StageProgram("headwater.services.engine", [], dict(os.environ))


@pytest.fixture(params=["a new interpreter", "a server of forks"])
def forks(request: pytest.FixtureRequest) -> Iterator[ForkClient | None]:
    if request.param == "a new interpreter":
        yield None
        return
    with fork_server([], environment=os.environ, free_variables=["PYTEST_CURRENT_TEST"]) as forks:
        yield forks


def holds(program: StageProgram) -> bool:
    """Whether memory is held from now on by the holder that the program knows."""
    number = int(program.env[WEIGHTS_HOLDER_FD])
    assert number in program.files
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("memory")
        stack.callback(os.close, memory)
        held = HeldMemory(memory=memory, layout=memory, num_bytes=0, checksum=0)
        return MemoryHolder(number).keep("key", held)


async def test_one_holder_serves_all_lives_of_an_engine_and_ends_with_the_stage(
    forks: ForkClient | None,
) -> None:
    holder = WeightsHolder(forks)
    assert holds(await holder.known_to(ENGINE))
    pid = holder.pid
    assert holds(await holder.known_to(ENGINE))
    assert holder.pid == pid
    await asyncio.wait_for(holder.stop(), GUARD_SECONDS)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


async def test_a_dead_holder_is_started_again_with_the_engine(
    forks: ForkClient | None,
) -> None:
    holder = WeightsHolder(forks)
    before = await holder.known_to(ENGINE)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    await asyncio.wait_for(holder.ended(), GUARD_SECONDS)
    assert not holds(before)
    assert holds(await holder.known_to(ENGINE))
    await asyncio.wait_for(holder.stop(), GUARD_SECONDS)


def test_weights_are_held_by_default_where_one_gpu_has_all_of_them() -> None:
    assert holds_weights(StackSettings(device="cuda"))
    assert not holds_weights(StackSettings(device="cuda", hold_weights="off"))
    assert not holds_weights(StackSettings(device="cuda", tensor_parallel_size=2))
    assert not holds_weights(StackSettings(device="cuda", executor="simulated"))
    assert not holds_weights(StackSettings(device="cpu"))
