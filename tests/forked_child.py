"""A program of a process that is about to be started, run by a fork of this process: what it would
import is there."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import structlog

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a process which starts others handles itself."""
STDOUT = 1
STDERR = 2


class ForkedChild:
    """A child of this process, with those methods of `asyncio.subprocess.Process` that servers and
    supervisors use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._watched = os.pidfd_open(pid)
        self._loop.add_reader(self._watched, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


def become(
    program: Callable[[], None],
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    descriptors: Iterable[int],
) -> NoReturn:
    """Runs the program in a process that was just forked, and ends the process. What it had is
    kept, but no open files other than its standard output, its standard errors and those named, no
    logs, no event loop and no handlers of `SIGNALS`."""
    status = 1
    try:
        # What was inherited stays: no collection closes a file whose number is another one's now.
        gc.freeze()
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        # No other file gets the number of one that is left: libuv closes its own again in each
        # child of this process.
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor in {0, *map(int, os.listdir("/proc/self/fd"))} - {
            STDOUT,
            STDERR,
            *descriptors,
        }:
            os.dup2(nothing, descriptor)
        asyncio.events._set_running_loop(None)
        asyncio.set_event_loop(None)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(arguments)
        logging.root.handlers.clear()
        structlog.reset_defaults()
        program()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
