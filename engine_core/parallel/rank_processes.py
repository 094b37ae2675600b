"""The processes of an engine's ranks on this host: started, watched, ended. Knows nothing of what
they compute.

Everything between processes is inherited, memory without a name and pipes, so that no other process
can reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Protocol

from ..options import ExecutorOptions
from .copied_process import CopiedProcess
from .memory_group import GroupEnd, create_group
from .rank_rings import RankRings
from .rank_start import RankStart, SharedMemory
from .rendezvous import Rendezvous

MODULE = "headwater.engine_core.executors.rank_process"
EXIT_SECONDS = 1.0
"""Time that ranks have to end by themselves."""


def load_rank_program() -> ModuleType:
    """Imports what copied ranks run, which takes seconds on a slow machine."""
    return import_module(MODULE)


class Process(Protocol):
    """Methods of `subprocess.Popen` that `RankProcesses` uses."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class RankProcesses:
    """One process a rank of this host, for whole stages."""

    def __init__(
        self,
        options: ExecutorOptions,
        rings: Mapping[int, RankRings],
        memory: SharedMemory,
        variables: Mapping[int, Mapping[str, str]],
        *,
        copies: bool,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """`rings`: those of each rank, by its number; they are closed in this process.
        `options.num_threads`: compute threads of all of these ranks. `variables`: environment
        variables of each rank, in addition to this process's. `copies`: ranks are forked from this
        process, so they need not import; else each starts an interpreter. `rendezvous`: with ranks
        of other hosts, if there are any."""
        self.ranks = list(rings)
        options = replace(options, num_threads=max(1, options.num_threads // len(self.ranks)))
        lifelines = [os.pipe() for _ in rings]
        lives = [os.pipe() for _ in rings]
        groups = _groups(options, self.ranks)
        begin = _copied if copies else _started
        self._processes: list[Process] = []
        for i, rank in enumerate(self.ranks):
            start = RankStart(
                rank=rank,
                options=options,
                rings=rings[rank],
                group=groups[i],
                memory=memory,
                rendezvous=rendezvous,
                lifeline=lifelines[i][0],
                life=lives[i][1],
            )
            self._processes.append(begin(start, variables[rank]))
        # The ranks have inherited these; open here, they would hide the end of a dead rank.
        for own in rings.values():
            own.close()
        for group in groups:
            group.close()
        for fd in (*(lifeline for lifeline, _ in lifelines), *(life for _, life in lives)):
            os.close(fd)
        self._lifelines = [held for _, held in lifelines]
        self.lives = [watched for watched, _ in lives]
        """Descriptors that reach end of file when the process of a rank is gone, in the order of
        `ranks`."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def end_of(self, life: int) -> tuple[int, str]:
        """The rank whose descriptor of `lives` this is, and how its process ended."""
        i = self.lives.index(life)
        return self.ranks[i], _end_of(self._processes[i])

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self) -> None:
        """Ends the processes. `lives` stay open until `forget`."""
        for fd in self._lifelines:
            os.close(fd)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
        for process in self._processes:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """Closes the descriptors in `lives`. Call it after `close`, when nothing watches them."""
        for fd in self.lives:
            os.close(fd)


def _groups(options: ExecutorOptions, ranks: list[int]) -> list[GroupEnd]:
    """The group end of each rank: ranks of one stage form a group."""
    layout = options.layout
    of_stages = {
        stage: create_group(layout.tensor)
        for stage in sorted({layout.stage_index(rank) for rank in ranks})
    }
    return [of_stages[layout.stage_index(rank)][layout.shard(rank).index] for rank in ranks]


def _started(start: RankStart, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    threads = str(start.options.num_threads)
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, start.to_json()],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **variables},
        pass_fds=start.descriptors,
    )


def _copied(start: RankStart, variables: Mapping[str, str]) -> CopiedProcess:
    assert not variables, "a copy has the environment of this process"
    return CopiedProcess(partial(load_rank_program().run_rank, start), start.descriptors)


def _end_of(process: Process) -> str:
    try:
        status = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "has closed its pipes"
    if status >= 0:
        return f"ended with status {status}"
    # Real-time signals have no names.
    return "was ended by " + next(
        (each.name for each in signal.Signals if each == -status), f"signal {-status}"
    )
