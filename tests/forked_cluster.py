"""Clusters whose stages, cores and ranks are forked from a process that has the libraries.

Imports are most of what the start of a cluster costs, and the return of its processes. Clusters
whose processes a test looks at from outside start as in a deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

from headwater.services.runtime.process import PARENT_FD, READY_FD
from headwater.services.stack.fork_servers import NO_FORKS
from tests import forked_core
from tests.forked_child import STDERR, STDOUT, ForkedChild, become
from tests.forked_stage import ENGINE, ForkedStage

SUPERVISOR = "headwater.services.cli"
STAGES = (
    "headwater.gateway",
    ENGINE,
    "headwater.services.output_processor",
    "headwater.services.processor",
)


class ForkedCluster(ForkedStage):
    """The process of `headwater up`, which forks its stages itself, with those methods of
    `subprocess.Popen` that tests use."""

    def __init__(self, *arguments: str, environment: Mapping[str, str], output: int) -> None:
        super().__init__(SUPERVISOR, *arguments, environment=environment, stderr=output)

    def _prepare(self) -> None:
        os.setsid()
        os.dup2(STDERR, STDOUT)
        fork_stages(_fork_stage)
        forked_core.install()
        up: Any = importlib.import_module(f"{SUPERVISOR}.up")
        up.fork_servers = lambda settings: contextlib.nullcontext(NO_FORKS)

    def poll(self) -> int | None:
        return self.exitcode


class DetachedStage(ForkedStage):
    """A stage in a session of its own, for a supervisor that cannot fork: it has gRPC's threads."""

    def __init__(
        self, module: str, flags: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: Any
    ) -> None:
        named = {name: int(env[name]) for name in (READY_FD, PARENT_FD)}
        super().__init__(module, *flags, environment=env, stderr=stdout.fileno(), **named)

    def _prepare(self) -> None:
        os.setsid()
        os.dup2(STDERR, STDOUT)
        super()._prepare()


class AwaitedStage:
    """Methods of `asyncio.subprocess.Process` for a stage that another process has forked."""

    def __init__(self, stage: DetachedStage) -> None:
        assert stage.pid is not None
        self.pid = stage.pid
        self._stage = stage
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(stage.sentinel, self._receive_end)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        self._stage.send_signal(number)

    def _receive_end(self) -> None:
        self._loop.remove_reader(self._stage.sentinel)
        assert self._stage.exitcode is not None
        self._ended.set_result(self._stage.exitcode)


def detach_stages() -> None:
    """Supervisors of this process have their stages forked by the server of forks, which it
    starts."""
    forkserver.ensure_running()
    fork_stages(
        lambda module, flags, **options: AwaitedStage(DetachedStage(module, flags, **options))
    )


def fork_stages(fork: Callable[..., ForkedChild | AwaitedStage]) -> None:
    """From here on `asyncio.create_subprocess_exec` starts stages so, and other programs as it is
    used to."""
    start_program: Any = asyncio.create_subprocess_exec

    async def start(*command: str, **options: Any) -> Any:
        match command:
            case [sys.executable, "-m", module, *flags] if module in STAGES:
                return fork(module, flags, **options)
        return await start_program(*command, **options)

    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


def _fork_stage(
    module: str,
    flags: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    stdout: Any,
    **_: Any,
) -> ForkedChild:
    if (pid := os.fork()) == 0:
        os.setsid()
        os.dup2(stdout.fileno(), STDOUT)
        os.dup2(stdout.fileno(), STDERR)
        become(
            lambda: importlib.import_module(f"{module}.__main__").main(),
            [module, *flags],
            environment=env,
            descriptors=pass_fds,
        )
    return ForkedChild(pid)
