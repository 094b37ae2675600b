"""One run of one supervised process: started, ready, ended. Does not know what the process does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from ..runtime.forked import ForkClient, Process
from ..runtime.owner_file import open_log
from ..runtime.process import PARENT_FD, READY_FD
from ..runtime.progress import Report
from ..runtime.tasks import end
from .embedded import EmbeddedServer, EmbeddedServerError

Addresses = Mapping[str, str]
"""Addresses that a stage announced: kind of address → host:port."""


LAST_WORDS_BYTES = 64 * 1024


class StageDied(Exception):
    """A process ended before it was ready; carries the last line of its log."""

    def __init__(self, name: str, returncode: int, log: Path) -> None:
        lines = _end_of(log).strip().splitlines()
        super().__init__(
            f"{name} ended with status {returncode}: {lines[-1] if lines else 'no word'} "
            f"(log: {log})"
        )
        self.name = name
        self.returncode = returncode
        self.log = log


def _end_of(log: Path) -> str:
    """Last lines of a log that may have grown for months."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_WORDS_BYTES))
        return file.read().decode(errors="replace")


class SupervisorPipe:
    """A pipe that only the supervisor holds open: its end of file tells every child that the
    supervisor is gone."""

    def __init__(self) -> None:
        self.watched, self._held = os.pipe()

    def close(self) -> None:
        os.close(self.watched)
        os.close(self._held)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """A stage's module with its flags, its environment, and the files that it inherits."""

    module: str
    flags: Sequence[str]
    env: Mapping[str, str]
    files: Sequence[int] = ()


class StageProcess:
    """A running child in a process group of its own, so that a terminal's Ctrl-C reaches the
    supervisor alone. NOTE: not in a session of its own, for the reason that `fork_server` gives."""

    def __init__(self, name: str, process: Process, word: asyncio.StreamReader, log: Path) -> None:
        self.name = name
        self.log = log
        self.children: tuple[int, ...] = ()
        """Process ids of what the stage started itself, since it is ready."""
        self._process = process
        self._word = word

    @classmethod
    async def start(
        cls,
        name: str,
        program: StageProgram,
        *,
        log: Path,
        supervisor: SupervisorPipe,
        forks: ForkClient | None = None,
    ) -> StageProcess:
        """Starts the stage by a server of forks, else in a new interpreter. Cancelled, or where the
        system has no room for a process, it leaves nothing behind."""
        ready_read, ready_write = os.pipe()
        word = asyncio.StreamReader()
        try:
            reading, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(word), os.fdopen(ready_read, "rb", 0)
            )
            with contextlib.ExitStack() as undo:
                undo.callback(reading.close)
                with open_log(log, append=True) as output:
                    env = {
                        **program.env,
                        READY_FD: str(ready_write),
                        PARENT_FD: str(supervisor.watched),
                    }
                    files = (ready_write, supervisor.watched, *program.files)
                    process = await _started(replace(program, env=env, files=files), output, forks)
                undo.pop_all()
        finally:
            os.close(ready_write)
        return cls(name, process, word, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Addresses:
        """Waits for the addresses that the process announces. Raises `StageDied` when it ends
        instead."""
        line = await self._word.readline()
        if not line:
            raise StageDied(self.name, await self.ended(), self.log)
        word = json.loads(line)
        self.children = tuple(word.get("children", ()))
        addresses: Addresses = word["addresses"]
        return addresses

    async def ended(self) -> int:
        """Exit status of the process; a negative number is the signal that ended it."""
        return await self._process.wait()

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        """SIGTERM, then SIGKILL after `limit` seconds or as soon as `hurry` is set."""
        self._signal(signal.SIGTERM)
        ending = asyncio.ensure_future(self.ended())
        impatience = asyncio.ensure_future(hurry.wait())
        await asyncio.wait((ending, impatience), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        if not ending.done():
            self._signal(signal.SIGKILL)
        await ending

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


async def _started(program: StageProgram, log: BinaryIO, forks: ForkClient | None) -> Process:
    if forks is not None:
        files = {1: log.fileno(), 2: log.fileno()} | {file: file for file in program.files}
        module = f"{program.module}.__main__"
        if forked := await forks.start(module, program.flags, environment=program.env, files=files):
            return forked
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program.module, *program.flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(program.env),
        pass_fds=program.files,
        process_group=0,
    )


class Child(Protocol):
    """A running process as `KeptStage` uses it: `StageProcess` or `ServerProcess`."""

    @property
    def children(self) -> tuple[int, ...]: ...
    @property
    def pid(self) -> int: ...
    async def ready(self) -> Addresses: ...
    async def ended(self) -> int: ...
    async def stop(self, limit: float, hurry: asyncio.Event) -> None: ...


class ServerProcess:
    """An embedded server among the stages: ready when it has started."""

    children: tuple[int, ...] = ()

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        return self._server.pid

    async def ready(self) -> Addresses:
        return {"url": self._server.url, "port": str(self._server.port)}

    async def ended(self) -> int:
        return await self._server.wait()

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        await self._server.stop()


class KeptStage:
    """A stage that is started again whenever it dies, with growing pauses; a long life makes them
    short again."""

    PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
    """Seconds before it is started again, by the number of deaths in short order."""
    LONG_LIFE = 10.0
    """Seconds from ready on after which a death no longer counts as a crash at start. Starts on
    CPUs take one to three, a start of 8B on an H100 some six (2026-11-27)."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Child]],
        changed: Callable[[str], None],
        stopped: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`stopped` is called when the stage has ended for good."""
        self.name = name
        self.addresses: Addresses = {}
        """Addresses of the last life that got ready."""
        self.process: Child | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.pauses: Sequence[float] = self.PAUSES
        self._start = start
        self._changed = changed
        self._stopped = stopped

    async def begin(self) -> None:
        """The first life; a death before it is ready is the caller's to handle."""
        self.process = await self._start()
        self.addresses = await self.process.ready()
        self._changed(f"{self.name} is ready")

    def guard(self, tasks: asyncio.TaskGroup) -> None:
        """Has `keep` run by `tasks`, until the stage is stopped."""
        self._keeper = tasks.create_task(self.keep(), name=self.name)

    async def keep(self) -> None:
        """Restarts the process that `begin` started whenever it ends; runs until cancelled."""
        clock = asyncio.get_running_loop().time
        deaths = 0
        while True:
            assert self.process is not None
            born = clock()
            status = await self.process.ended()
            deaths = 0 if clock() - born > self.LONG_LIFE else deaths
            pause = self.pauses[min(deaths, len(self.pauses) - 1)]
            deaths += 1
            self._changed(
                f"{self.name} ended with status {status}; starting it again in {pause:g} s"
            )
            await asyncio.sleep(pause)
            try:
                await self.begin()
            except (StageDied, EmbeddedServerError, OSError) as death:
                self._changed(str(death))

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        """Ends the process for good."""
        if self._keeper is not None:
            await end(self._keeper)
        if self.process is not None:
            await self.process.stop(limit, hurry)
        await self.release()

    async def release(self) -> None:
        """Releases what is kept for the stage's next start: there will be none."""
        if self._stopped is not None:
            await self._stopped()


async def begin_all(stages: Sequence[KeptStage], report: Report) -> None:
    """Waits until all are ready; the first that dies ends the waiting."""
    num_ready = 0
    what = "starting " + ", ".join(
        dict.fromkeys(stage.name.rstrip("-0123456789") for stage in stages)
    )

    async def begin(stage: KeptStage) -> None:
        nonlocal num_ready
        await stage.begin()
        num_ready += 1
        report(what, num_ready, len(stages))

    report(what, 0, len(stages))
    tasks = [asyncio.ensure_future(begin(stage)) for stage in stages]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)
