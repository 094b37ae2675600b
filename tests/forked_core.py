"""The core of an engine that tests start, forked from its server: a new interpreter takes seconds to import torch.

A server that is a `ForkedStage` has inherited the libraries, and has no thread yet when it starts its core. Threads and
environment that libraries read when they are imported are those of the tests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence

import structlog

from headwater.services.engine import core_client, core_process


class ForkedCore:
    """A child of this process, with those methods of `asyncio.subprocess.Process` that the server uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._watched = os.pidfd_open(pid)
        self._loop.add_reader(self._watched, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


async def start_forked_core(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> ForkedCore:
    """In place of `core_client.start_core`."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the server's other threads"
    if (pid := os.fork()) == 0:
        _become_core(arguments, environment, descriptors)
    return ForkedCore(pid)


def install() -> None:
    """For the engine whose server this process is about to be."""
    core_client.start_core = start_forked_core


def _become_core(arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Runs the core's program and ends the process. What the server had is kept, but no open files and no logs."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        kept = sorted({sys.stdout.fileno(), sys.stderr.fileno(), *descriptors})
        for before, after in itertools.pairwise([-1, *kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(before + 1, after)
        assert os.open(os.devnull, os.O_RDONLY) == 0
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [core_process.__file__, *arguments]
        logging.root.handlers.clear()
        structlog.reset_defaults()
        core_process.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
