"""A child process that is forked from this one, with its imported modules. Does not know what the
child does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection

POLL_SECONDS = 0.005
STANDARD_OUTPUT = 1
STANDARD_ERROR = 2


class CopiedProcess:
    """The methods of `subprocess.Popen` that `Ranks` uses."""

    def __init__(self, run: Callable[[], None], descriptors: Collection[int]) -> None:
        """The child calls `run` and ends. Of this process's descriptors it has those given,
        standard output and error.

        NOTE: a copy has one thread. It must be made before anything here has computed: libgomp's
        threads would be missing in the child, which waits for them for ever.
        """
        self._status: int | None = None
        # `wait` is called by two threads.
        self._waiting = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(run, descriptors)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative where a signal ended the process. Raises
        `subprocess.TimeoutExpired`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self._poll()) is None:
            if end is not None and time.monotonic() > end:
                assert timeout is not None
                raise subprocess.TimeoutExpired(["a copied process"], timeout)
            time.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        with self._waiting:
            # Until the child is reaped, its process id is not reused.
            if self._ended() is None:
                os.kill(self.pid, signal.SIGKILL)

    def _poll(self) -> int | None:
        with self._waiting:
            return self._ended()

    def _ended(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _run_and_exit(run: Callable[[], None], descriptors: Collection[int]) -> None:
    status = 1
    try:
        drop_descriptors({STANDARD_OUTPUT, STANDARD_ERROR, *descriptors})
        run()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        os.write(STANDARD_ERROR, traceback.format_exc().encode())
    finally:
        # Ends without unwinding the stack: cleanup by the callers is the parent's.
        os._exit(status)


def drop_descriptors(kept: Collection[int]) -> None:
    """Closes all descriptors of the parent in the child but `kept`: an inherited end of a pipe
    would hide the parent's death from another rank. The numbers stay taken, by the null device,
    since objects of the parent close them when they are collected."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir("/dev/fd")]:
        if number not in kept and number != null and _is_open(number):
            os.dup2(null, number, inheritable=False)


def _is_open(number: int) -> bool:
    """The listing itself had a descriptor, which is closed by now."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
