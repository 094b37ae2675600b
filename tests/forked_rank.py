"""Ranks of engines that tests build in their own process, forked from one that has imported torch.

A new interpreter takes seconds to import it, and a test starts two to four ranks. Those of an
engine that starts as in a deployment are interpreters of their own
(`tests/services/engine/test_ranks.py`).
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from headwater.engine_core.executors.ranks import multi
from headwater.engine_core.parallel import host_link, rank_processes, ranks
from headwater.engine_core.parallel.rank_start import RankStart
from tests import forked_stage  # noqa: F401 (names what the server of forks imports)
from tests.forked_core import LEAST_SILENCE, STARTING_SILENCE

STDOUT = 1
STDERR = 2
EXIT_SECONDS = 30.0
"""The server of forks reports how a rank has ended, and may be scheduled late on a busy machine."""


class ForkedRank(ForkServerProcess):
    """A rank's process, with those methods of `subprocess.Popen` that an executor uses. It is
    started at once, and has the open files of the executor's process under the same numbers."""

    def __init__(self, start: RankStart, variables: Mapping[str, str]) -> None:
        super().__init__(name=f"rank {start.rank}")
        # As the executor's process has them now: the server that forks has those of its own start.
        self._environment = {**os.environ, **variables}
        self._reported = start.to_json()
        self._waits = threading.Lock()
        self._numbers = (STDOUT, STDERR, *start.descriptors)
        self._threads = start.options.num_threads
        self.start()

    def __getstate__(self) -> dict[str, Any]:
        files = [DupFd(number) for number in self._numbers]
        return {name: value for name, value in self.__dict__.items() if name != "_waits"} | {
            "_files": files
        }

    def run(self) -> None:
        # What was inherited stays: no collection looks at it, which would copy the pages that hold
        # it.
        gc.freeze()
        # A number that another file is to have would be overwritten below.
        free = max(self._numbers) + 1
        moved = [fcntl.fcntl(file.detach(), fcntl.F_DUPFD, free) for file in self._files]
        for number, file in zip(self._numbers, moved, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(self._environment)
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads))
        sys.argv = [rank_processes.MODULE, self._reported]
        importlib.import_module(rank_processes.MODULE).main()

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status, negative where a signal ended it. Raises `subprocess.TimeoutExpired`."""
        with self._waits:
            self.join(seconds)
            if self.exitcode is None:
                raise subprocess.TimeoutExpired(self.name, seconds or 0.0)
            return self.exitcode


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Executors that are built meanwhile fork their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "_started", ForkedRank)
        patch.setattr(rank_processes, "EXIT_SECONDS", EXIT_SECONDS)
        patch.setattr(multi, "LEAST_SILENCE", LEAST_SILENCE)
        patch.setattr(host_link, "STARTING_SILENCE", STARTING_SILENCE)
        # A caller that finds a rank gone waits for the thread that asks the server of forks how it
        # ended.
        patch.setattr(ranks, "EXIT_SECONDS", 2 * EXIT_SECONDS)
        yield
