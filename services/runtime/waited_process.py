"""A process of a fork server, for threads: its methods block."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading

UNKNOWN_STATUS = 255
"""Exit status of a process whose fork server died first, as asyncio reports it for processes that
others reaped."""


class WaitedProcess:
    """A process that a fork server has started, with the methods of `subprocess.Popen` that its
    users call. One thread waits for it; others may look at it and kill it meanwhile."""

    def __init__(self, pid: int, pidfd: int, replies: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._replies = replies
        self._status: int | None = None
        self._lock = threading.Lock()
        """Held while the end is noted: no signal is sent after it."""

    def poll(self) -> int | None:
        """The exit status, negative where a signal ended the process; None while it runs."""
        with self._lock:
            if self._status is None and _is_over(self._pidfd, 0):
                with self._replies:
                    self._status = status_of(self._replies)
            return self._status

    def wait(self) -> int:
        _is_over(self._pidfd, None)
        status = self.poll()
        assert status is not None
        os.close(self._pidfd)
        return status

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def status_of(replies: socket.socket) -> int:
    """The exit status that a fork server sends; waits for it."""
    try:
        return int(replies.recv(32) or UNKNOWN_STATUS)
    except ConnectionError:
        return UNKNOWN_STATUS


def _is_over(pidfd: int, milliseconds: int | None) -> bool:
    """Whether the process has ended, after so long a wait at most; None: any time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(milliseconds))
