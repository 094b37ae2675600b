from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.services.runtime.forked import ForkClient, fork_server
from headwater.services.stack.stage_process import (
    KeptStage,
    StageDied,
    StageProcess,
    StageProgram,
    SupervisorPipe,
)
from tests.coded_stage.__main__ import PROGRAM
from tests.simulation.virtual_loop import run_virtually

READY = """import os, json, time
os.write(int(os.environ["HEADWATER_READY_FD"]), json.dumps({"addresses": {"grpc": "here"}}).encode() + b"\\n")
"""


class Starter:
    """Starts stages of any code: in a new interpreter, or by a server of forks."""

    def __init__(self, folder: Path, forks: ForkClient | None) -> None:
        self.folder = folder
        self.forks = forks

    async def __call__(self, code: str, pipe: SupervisorPipe) -> StageProcess:
        program = StageProgram(PROGRAM, [code], os.environ)
        log = self.folder / "stage.log"
        return await StageProcess.start(
            "stage", program, log=log, supervisor=pipe, forks=self.forks
        )


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.fixture(params=["a new interpreter", "a server of forks"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Starter]:
    if request.param == "a new interpreter":
        yield Starter(tmp_path, None)
        return
    with fork_server([], environment=os.environ, free_variables=["PYTEST_CURRENT_TEST"]) as forks:
        assert forks is not None
        yield Starter(tmp_path, forks)


async def test_a_stage_is_ready_with_the_addresses_that_it_announces(start: Starter) -> None:
    pipe = SupervisorPipe()
    stage = await start(READY + "time.sleep(600)", pipe)
    assert await stage.ready() == {"grpc": "here"}
    assert (parent_of(stage.pid) == os.getpid()) == (start.forks is None)
    await stage.stop(60, asyncio.Event())
    assert await stage.ended() == -signal.SIGTERM
    pipe.close()


async def test_a_stage_that_ends_before_it_is_ready_leaves_its_last_words(start: Starter) -> None:
    pipe = SupervisorPipe()
    stage = await start("import sys; print('no such model'); sys.exit(4)", pipe)
    with pytest.raises(StageDied, match="status 4: no such model"):
        await stage.ready()
    pipe.close()


def test_only_the_end_of_a_log_is_read_however_long_it_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        # A hole: it is nowhere, unless somebody reads it.
        log.seek(1 << 33)
        log.write(b"\nthe last words\n")
    assert "the last words" in str(StageDied("stage", 1, tmp_path / "log"))


async def test_a_stage_that_cannot_be_spawned_leaves_no_descriptor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a supervisor that tries again and again would run out of them, and then of every way to
    start anything."""
    pipe = SupervisorPipe()
    before = set(os.listdir("/proc/self/fd"))
    program = StageProgram(PROGRAM, [], os.environ)
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/no/such")
            with pytest.raises(FileNotFoundError):
                await StageProcess.start("stage", program, log=tmp_path / "log", supervisor=pipe)
        with pytest.raises(FileNotFoundError):
            await StageProcess.start("stage", program, log=tmp_path / "no/log", supervisor=pipe)
    # Transports close with the next turn of the loop.
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    pipe.close()


async def test_a_stage_that_does_not_end_is_killed_as_soon_as_somebody_is_in_a_hurry(
    start: Starter,
) -> None:
    pipe = SupervisorPipe()
    hurry = asyncio.Event()
    stage = await start(
        "import signal; signal.signal(15, signal.SIG_IGN)\n" + READY + "time.sleep(600)", pipe
    )
    await stage.ready()
    stopping = asyncio.ensure_future(stage.stop(60, hurry))
    await asyncio.sleep(0.05)
    hurry.set()
    async with asyncio.timeout(60):
        await stopping
    assert await stage.ended() == -signal.SIGKILL
    pipe.close()


async def test_a_stage_that_dies_is_started_again(start: Starter) -> None:
    pipe = SupervisorPipe()
    output = []
    ready_again = asyncio.Event()

    def changed(what: str) -> None:
        output.append(what)
        if output.count("stage is ready") == 2:
            ready_again.set()

    kept = KeptStage("stage", lambda: start(READY + "time.sleep(600)", pipe), changed)
    await kept.begin()
    keeping = asyncio.ensure_future(kept.keep())
    assert kept.process is not None
    first = kept.process.pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        await ready_again.wait()
    assert kept.process.pid != first
    assert output[1] == "stage ended with status -9; starting it again in 0 s"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await kept.stop(5, asyncio.Event())
    pipe.close()


class ShortLived:
    """A process that is ready at once and ends by itself after so many seconds."""

    children: tuple[int, ...] = ()
    pid = 1

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def ready(self) -> dict[str, str]:
        return {}

    async def ended(self) -> int:
        await asyncio.sleep(self._seconds)
        return 1

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        """Has nothing to end."""


def test_pauses_grow_from_death_to_death_and_are_short_again_after_a_long_life() -> None:
    assert run_virtually(pauses_between(0.0, 0.0, 0.0, 2 * KeptStage.LONG_LIFE, 0.0), 0) == [
        0.0,
        0.01,
        0.02,
        0.0,
        0.01,
    ]


async def pauses_between(*seconds: float) -> list[float]:
    """Pauses before the restarts of a kept stage whose lives last so many seconds."""
    output = list[str]()
    lives = iter((*seconds, 60.0))
    is_last = asyncio.Event()

    async def start() -> ShortLived:
        life = next(lives)
        if life == 60.0:
            is_last.set()
        return ShortLived(life)

    kept = KeptStage("stage", start, output.append)
    kept.pauses = (0.0, 0.01, 0.02, 0.03)
    await kept.begin()
    keeping = asyncio.ensure_future(kept.keep())
    await is_last.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    return [float(word.split()[-2]) for word in output if "starting it again" in word]
