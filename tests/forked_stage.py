"""Stages as processes that are forked from one that has imported what stages use.

A stage imports the modules that it still lacks and runs the program that `python -m` runs, with
flags, environment and file descriptors of its own. Imports cost most of the time that a stage takes
to start; each worker of a test run makes them once.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

from headwater.services.runtime import prober
from headwater.services.stack.fork_servers import CORE_MODULES, STAGE_MODULES

MODULES = [
    *CORE_MODULES["cpu"],
    *STAGE_MODULES,
    "headwater.engine_core.executors.rank_process",
    "httpx",
    "triton.language",
]
"""What the servers of forks of a deployment import, and what ranks and `headwater up` import
besides."""
STDERR = "stderr"
ENGINE = "headwater.services.engine"
multiprocessing.get_context("forkserver").set_forkserver_preload(MODULES)


class ForkedStage(ForkServerProcess):
    """A stage's process, with those methods of `subprocess.Popen` that tests use. It is started at
    once.

    `descriptors` names open files of this process. Each is the stage's under a number of its own,
    which the environment variable of that name holds.
    """

    def __init__(
        self,
        stage: str,
        *flags: str,
        stderr: int,
        environment: Mapping[str, str] = os.environ,
        **descriptors: int,
    ) -> None:
        super().__init__(name=stage)
        self._stage = stage
        self._flags = flags
        self._environment = dict(environment)
        self._files: dict[str, Any] = {STDERR: stderr} | descriptors
        self.start()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {name: DupFd(file) for name, file in self._files.items()}}

    def run(self) -> None:
        # What was inherited stays: no collection looks at it, which would copy the pages that hold
        # it.
        gc.freeze()
        numbers = {name: file.detach() for name, file in self._files.items()}
        os.dup2(numbers.pop(STDERR), sys.stderr.fileno())
        os.environ.clear()
        os.environ.update(
            self._environment | {name: str(number) for name, number in numbers.items()}
        )
        sys.argv = [self._stage, *self._flags]
        self._prepare()
        self._main()

    def _main(self) -> None:
        importlib.import_module(f"{self._stage}.__main__").main()

    def _prepare(self) -> None:
        if self._stage == ENGINE:
            importlib.import_module("tests.forked_core").install()

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        if self.exitcode is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status, negative where a signal ended it. Raises `subprocess.TimeoutExpired`."""
        self.join(seconds)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, seconds or 0.0)
        return self.exitcode


class PatientStage(ForkedStage):
    """A stage that takes none of its seeds for gone which a busy machine keeps from answering; one
    that has ended refuses the connection. Processes of a test run were held up for seconds, after
    which a gateway refused whatever was asked for (2026-11-30)."""

    def _prepare(self) -> None:
        super()._prepare()
        prober.PROBE_SECONDS = 60.0
