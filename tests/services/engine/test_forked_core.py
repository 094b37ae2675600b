"""An engine's core that a server of forks starts for the engine's server."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.services.engine.core import launch
from headwater.services.engine.core.environment import core_environment
from headwater.services.engine.core.variables import CORE_FORKS_FD, WEIGHTS_HOLDER_FD
from headwater.services.runtime.forked import ForkClient, fork_server
from tests.engine_core.test_held_memory import Holder
from tests.gateway.processes import launched
from tests.polling import holds_within
from tests.services.engine import standby
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    wait_for_end,
)

PROMPT = list(range(300, 340))
THREADS = 1


@pytest.fixture
def forks() -> Iterator[ForkClient]:
    modules = ["headwater.services.engine.core.process"]
    of_pytest = ["PYTEST_CURRENT_TEST"]
    with fork_server(
        modules, environment=core_environment(THREADS), free_variables=of_pytest
    ) as client:
        assert client is not None
        yield client


@contextlib.contextmanager
def engine_beside(
    forks: ForkClient, threads: int = THREADS, **more: int
) -> Iterator[EngineProcess]:
    """An engine that is told of the server of forks, and of `more` descriptors."""
    more[CORE_FORKS_FD] = forks.socket.fileno()

    def start(module: str, *flags: str, stderr: int, **descriptors: int) -> object:
        return launched(module, *flags, stderr=stderr, **descriptors, **more)

    with engine_process(f"--threads={threads}", start=start) as engine:
        yield engine


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def files_of(pid: int) -> dict[int, str]:
    """Open files by their descriptors."""
    folder = Path(f"/proc/{pid}/fd")
    return {int(each.name): os.readlink(each) for each in folder.iterdir() if each.is_symlink()}


async def is_answered(engine: EngineProcess) -> bool:
    async with client_of(engine) as client:
        await client.send(add(1, PROMPT))
        await client.read_until_finished(1)
        return client.tokens[1] == answer(PROMPT)


async def test_a_forked_core_serves_and_ends_with_its_server(forks: ForkClient) -> None:
    with contextlib.ExitStack() as stack:
        holder = Holder()
        stack.callback(holder.close)
        requests = holder.requests
        of_holder = {WEIGHTS_HOLDER_FD: requests.fileno()}
        engine = stack.enter_context(engine_beside(forks, **of_holder))
        core = engine.core_pid
        assert files_of(os.getpid())[requests.fileno()] in files_of(core).values()
        assert parent_of(core) != engine.pid
        assert parent_of(parent_of(core)) == os.getpid()
        assert await is_answered(engine)
        engine.process.send_signal(signal.SIGKILL)
        wait_for_end(core, 60)


async def test_a_core_runs_in_the_process_that_stands_by(
    forks: ForkClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STANDBY_MODULE", standby.__name__)
    monkeypatch.setenv("HEADWATER_PROBE", str(tmp_path / "pid"))
    # Of an engine without weights that are held, none stands by.
    monkeypatch.setenv(CORE_FORKS_FD, str(forks.socket.fileno()))
    launch.stand_by(core_environment(THREADS), "id")
    with contextlib.closing(Holder()) as holder:
        requests = holder.requests
        monkeypatch.setenv(WEIGHTS_HOLDER_FD, str(requests.fileno()))
        launch.stand_by(core_environment(THREADS), "id")
        assert holds_within((tmp_path / "pid").is_file, 60)
        with engine_beside(forks, **{WEIGHTS_HOLDER_FD: requests.fileno()}) as engine:
            assert (tmp_path / "pid").read_text() == f"{engine.core_pid} id"
            assert await is_answered(engine)


@pytest.mark.long
async def test_an_engine_ends_when_its_forked_core_is_killed(forks: ForkClient) -> None:
    with engine_beside(forks) as engine:
        os.kill(engine.core_pid, signal.SIGKILL)
        assert engine.wait() == 1
        assert "the engine core ended with status -9" in engine.close()


async def test_a_forked_core_serves_on_when_the_server_of_forks_is_killed_and_its_end_is_seen(
    forks: ForkClient,
) -> None:
    with engine_beside(forks) as engine:
        core = engine.core_pid
        os.kill(parent_of(core), signal.SIGKILL)
        assert await is_answered(engine)
        os.kill(core, signal.SIGKILL)
        assert engine.wait() == 1


@pytest.mark.long
async def test_a_core_of_other_threads_starts_from_nothing(forks: ForkClient) -> None:
    with engine_beside(forks, THREADS + 1) as engine:
        assert parent_of(engine.core_pid) == engine.pid
        assert await is_answered(engine)
