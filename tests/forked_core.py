"""The core of an engine that tests start, forked from its server, and the core's ranks: a new interpreter takes seconds
to import torch.

A server that is a `ForkedStage` has inherited the libraries, and has no thread yet when it starts its core. Threads and
environment that libraries read when they are imported are those of the tests.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from headwater.engine_core.parallel import ranks
from headwater.engine_core.parallel.rank_start import RankStart
from headwater.services.engine import core_client, core_process
from tests.forked_child import ForkedChild, become


async def start_forked_core(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> ForkedChild:
    """In place of `core_client.start_core`."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the server's other threads"
    if (pid := os.fork()) == 0:
        argv = [core_process.__file__, *arguments]
        become(core_process.main, argv, environment=environment, descriptors=descriptors)
    return ForkedChild(pid)


class RankOfCore:
    """A rank's process, with those methods of `subprocess.Popen` that an executor uses."""

    def __init__(self, start: RankStart, variables: Mapping[str, str]) -> None:
        self._status: int | None = None
        self._reaps = threading.Lock()
        program = importlib.import_module(ranks.MODULE).main
        if (pid := os.fork()) == 0:
            environment = os.environ | variables
            become(program, [ranks.MODULE, start.to_json()], environment=environment, descriptors=start.descriptors)
        self.pid = pid
        self._watched = os.pidfd_open(pid)

    def kill(self) -> None:
        if self._status is None:
            signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status, negative where a signal ended it. Raises `subprocess.TimeoutExpired`."""
        if not select.select([self._watched], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(ranks.MODULE, seconds or 0.0)
        with self._reaps:
            if self._status is None:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._status


def install() -> None:
    """For the engine whose server this process is about to be."""
    core_client.start_core = start_forked_core
    ranks._started = RankOfCore
