"""`headwater up` whose stages, cores and ranks are forked from its own process, which has inherited the libraries.

Imports are most of what the start of a cluster costs, and the return of its processes. Clusters whose processes a test
looks at from outside start as in a deployment.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests import forked_core
from tests.forked_child import STDERR, STDOUT, ForkedChild, become
from tests.forked_stage import ENGINE, ForkedStage

SUPERVISOR = "headwater.services.cli"
STAGES = ("headwater.gateway", ENGINE, "headwater.services.output_processor", "headwater.services.processor")


class ForkedCluster(ForkedStage):
    """The supervisor's process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, *arguments: str, environment: Mapping[str, str], output: int) -> None:
        super().__init__(SUPERVISOR, *arguments, environment=environment, stderr=output)

    def _prepare(self) -> None:
        os.setsid()
        os.dup2(STDERR, STDOUT)
        asyncio.create_subprocess_exec = fork_stages_of(asyncio.create_subprocess_exec)
        forked_core.install()

    def poll(self) -> int | None:
        return self.exitcode


def fork_stages_of(start_program: Any) -> Any:
    """`asyncio.create_subprocess_exec` that forks stages, and starts other programs as it is used to."""

    async def start(*command: str, **options: Any) -> Any:
        match command:
            case [sys.executable, "-m", module, *flags] if module in STAGES:
                return _fork_stage(module, flags, **options)
        return await start_program(*command, **options)

    return start


def _fork_stage(
    module: str, flags: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], stdout: Any, **_: Any
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
