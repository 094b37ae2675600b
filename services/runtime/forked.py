"""The client's end of a server of forks (`fork_server`): starts one, asks it for processes, waits
for their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from .waited_process import UNKNOWN_STATUS, WaitedProcess

SERVER = "headwater.services.runtime.fork_server"
STAGE_FORKS_FD = "HEADWATER_STAGE_FORKS_FD"
"""Variable with the file descriptor of a socket that asks the server of forks of stages for
processes. A supervisor sets it for processors, whose checkers of grammars are forked."""
REPLY_SECONDS = 60.0
"""Seconds that a fork is waited for: a server that begins may import for some thirty on a busy
machine. One that hangs must not keep stages that died from starting again."""


class ForkedProcess:
    """A process that a fork server has started, with the methods of `asyncio.subprocess.Process`
    that supervisors use. A pidfd identifies it, so that no signal reaches a later process with the
    same id."""

    def __init__(self, pid: int, pidfd: int, replies: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._replies = replies
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(replies.fileno(), self._on_reply)

    async def wait(self) -> int:
        """The exit status, negative where a signal ended the process."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Raises `ProcessLookupError` after the end of the process."""
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _on_reply(self) -> None:
        self._loop.remove_reader(self._replies.fileno())
        with self._replies:
            word = _received(self._replies)
        if word:
            self._end(int(word))
        else:
            # The server is gone, and with it the status; the process may go on for long.
            self._loop.add_reader(self._pidfd, self._on_unseen_end)

    def _on_unseen_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._end(UNKNOWN_STATUS)

    def _end(self, status: int) -> None:
        os.close(self._pidfd)
        self._ended.set_result(status)


class Process(Protocol):
    """Methods of `asyncio.subprocess.Process` that its supervisors use, of whatever has started the
    process."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


class ForkClient:
    """Asks a server of forks for processes. A process that inherits `socket` may ask as well."""

    def __init__(self, requests: socket.socket) -> None:
        self.socket = requests
        requests.setblocking(False)

    @classmethod
    def inherited(cls, variable: str) -> ForkClient | None:
        """A client with the socket that the environment variable names, which stays open; None
        where it names none."""
        if (number := os.environ.get(variable)) is None:
            return None
        return cls(socket.socket(fileno=os.dup(int(number))))

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        files: Mapping[int, int],
    ) -> ForkedProcess | None:
        """A process in a group of its own, so that a terminal's Ctrl-C does not reach it, that runs
        the module's `main`. `files`: number there → number here.

        None where the server is gone, hangs, is asked for too much at once, or imported its modules
        with other variables; such a process is to be started anew. Cancelled, it leaves no process
        behind.
        """
        with contextlib.ExitStack() as undo:
            replies = self._ask(module, arguments, environment, files)
            if replies is None:
                return None
            undo.enter_context(replies)
            try:
                async with asyncio.timeout(REPLY_SECONDS):
                    await _readable(replies)
            except TimeoutError:
                return None
            if (started := _started(replies)) is None:
                return None
            undo.pop_all()
        return ForkedProcess(*started, replies)

    def start_waited(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        files: Mapping[int, int],
    ) -> WaitedProcess | None:
        """A process as of `start`, for threads. Returns when it has begun."""
        replies = self._ask(module, arguments, environment, files)
        if replies is None:
            return None
        replies.settimeout(REPLY_SECONDS)
        if (started := _started(replies)) is None:
            replies.close()
            return None
        replies.settimeout(None)
        return WaitedProcess(*started, replies)

    def _ask(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int],
    ) -> socket.socket | None:
        """The socket at which the server replies to a request; None where none could be sent."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "targets": list(files),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                sent = [json.dumps(request).encode()], [theirs.fileno(), *files.values()]
                socket.send_fds(self.socket, *sent)
            except OSError:
                ours.close()
                return None
        return ours

    def stand_by(
        self, module: str, arguments: Sequence[str] = (), *, environment: Mapping[str, str]
    ) -> None:
        """Has a process forked ahead that runs the module's `main`, and then the next program of
        this environment. Nothing happens where one stands by already, or the server cannot."""
        self._send(standby=module, arguments=list(arguments), environment=dict(environment))

    def prepare(self, module: str, arguments: Sequence[str] = ()) -> None:
        """Has the server call the module's `prepare`, before what it is asked for later: these
        programs share what it has read. Nothing happens where the server is gone."""
        self._send(prepare=module, arguments=list(arguments))

    def _send(self, **request: object) -> None:
        """Sends a request without a reply."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(request).encode())


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str], *, environment: Mapping[str, str], free_variables: Sequence[str] = ()
) -> Iterator[ForkClient | None]:
    """A server of forks that imports the modules with this environment, inside the `with` block;
    processes outlive it. Programs may have other values of `free_variables` and of HEADWATER_'s.
    None where the system has no pidfds."""
    if not _has_pidfds():
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    SERVER,
                    str(theirs.fileno()),
                    ",".join(free_variables),
                    *modules,
                ],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        try:
            yield ForkClient(ours)
        finally:
            server.kill()
            server.wait()


def _has_pidfds() -> bool:
    """Whether this is a Linux from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _started(replies: socket.socket) -> tuple[int, int] | None:
    """Id and pidfd of the process that was asked for; None: the server started none."""
    try:
        word, pidfds, _, _ = socket.recv_fds(replies, 32, 1)
    except (ConnectionError, TimeoutError):
        return None
    return (int(word), pidfds[0]) if word else None


def _received(replies: socket.socket) -> bytes:
    try:
        return replies.recv(32)
    except ConnectionError:
        return b""


async def _readable(file: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(file.fileno(), ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(file.fileno())
