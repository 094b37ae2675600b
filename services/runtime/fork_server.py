"""Forks programs from a process that has imported modules which they use:
`fork_server REQUESTS FREE_VARIABLES MODULE…`.

REQUESTS is a socket on which each message asks for one program, and carries the program's files and
a socket for the replies: first the process's id, with a pidfd, then its exit status. A request
whose environment is not that of the imports gets no reply. The server ends with the process that
started it; programs that it forked go on.

A request to prepare has the server itself call the `prepare` of a module, for what is read once:
programs that it forks later share it.

A request to stand by has one process forked ahead: it does what its module says, such as to open a
device, which cannot be done before a fork, and waits. The next program of that environment runs in
it.

NOTE: programs, and this server, have process groups of their own in the session that started them.
Linux (autogroup) divides processors among sessions first where it has no control groups, so that
nice values count within a session alone. With sessions of their own, NATS and Valkey waited 1 and 5
ms at each wake-up for grammars of a lower priority; in one session 0.2 and 0.5 (2026-11-30).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .process_title import set_title

PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_FILES = 64
RESERVED_FILES = 512
"""Descriptors that a process which stands by keeps free for files of its program: what it opens
meanwhile has higher ones."""
OWN_PREFIX = "HEADWATER_"
"""Prefix of variables that no library reads when it is imported."""


@dataclass(frozen=True, slots=True)
class Program:
    """A module whose `main` runs in a process of its own, with these arguments, variables and
    files."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    targets: Sequence[int]
    """Numbers that the files have in the process."""
    files: Sequence[int]

    @classmethod
    def of(cls, request: Mapping[str, Any], files: Sequence[int]) -> Program:
        return cls(
            module=request["module"],
            arguments=request["arguments"],
            environment=request["environment"],
            targets=request["targets"],
            files=files,
        )

    def run(self) -> None:
        """Runs in the process that was forked for it; other files than the standard ones are closed
        by then."""
        os.setpgid(0, 0)
        self._place_files()
        os.environ.clear()
        os.environ.update(self.environment)
        module = import_module(self.module)
        sys.argv = [module.__file__ or self.module, *self.arguments]
        name = self.module.removesuffix(".__main__")
        set_title([sys.executable, "-m", name, *self.arguments])
        module.main()

    def _place_files(self) -> None:
        above = max(self.targets, default=2) + 1
        # A number that a file is to have may be another one's now.
        held = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in self.files]
        for file in self.files:
            os.close(file)
        for file, target in zip(held, self.targets, strict=True):
            os.dup2(file, target)
            os.close(file)


@dataclass(frozen=True, slots=True)
class Standby:
    """The work of a process that was forked ahead: a module's `main`, then the program that
    comes."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    requests: socket.socket

    def run(self) -> None:
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(self.environment)
        set_title([sys.executable, "-m", self.module, *self.arguments])
        sys.argv = [self.module, *self.arguments]
        reserved = _reserve()
        import_module(self.module).main()
        message, files, _, _ = socket.recv_fds(self.requests, MAX_REQUEST_BYTES, MAX_FILES)
        self.requests.close()
        for file in reserved:
            os.close(file)
        if message:
            Program.of(json.loads(message), files).run()


@dataclass(slots=True, eq=False)
class Spare:
    """A process that stands by."""

    pid: int
    pidfd: int
    requests: socket.socket
    environment: Mapping[str, str]

    def close(self) -> None:
        os.close(self.pidfd)
        self.requests.close()


@dataclass(slots=True, eq=False)
class Child:
    """A forked program that runs, and the client that waits for its end."""

    pid: int
    pidfd: int
    reply: socket.socket
    has_client: bool = True

    def close(self) -> None:
        os.close(self.pidfd)
        self.reply.close()


class ForkServer:
    def __init__(self, requests: socket.socket, free_variables: frozenset[str]) -> None:
        self._requests = requests
        self._free = free_variables
        self._imported_with = dict(os.environ)
        self._children: set[Child] = set()
        self._spares: set[Spare] = set()
        """One for each environment."""
        # NOTE: not epoll, whose registrations a fork shares.
        self._selector = selectors.PollSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def serve(self) -> Program | Standby | None:
        """Forks programs until no client is left. Returns in each fork, with its program, and at
        the end with None."""
        while True:
            for key, _ in self._selector.select():
                child = key.data
                if child is None:
                    request, files, flags, _ = socket.recv_fds(
                        self._requests, MAX_REQUEST_BYTES, MAX_FILES
                    )
                    if not request:
                        return None
                    is_whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
                    if is_whole and (program := self._obey(json.loads(request), files)) is not None:
                        return program
                    # Where nothing was forked, the client sees that the socket for replies is
                    # closed.
                    for file in files:
                        os.close(file)
                elif child in self._spares:
                    self._end(child)
                elif child in self._children and key.fileobj == child.pidfd:
                    self._reap(child)
                elif child in self._children:
                    self._leave_behind(child)

    def _obey(self, request: Mapping[str, Any], files: Sequence[int]) -> Program | Standby | None:
        """The program in a fork, None in the server, also where the system has no room for a
        fork."""
        if "prepare" in request:
            import_module(request["prepare"]).prepare(*request["arguments"])
            gc.freeze()
            return None
        if not self._suits(request["environment"]):
            return None
        if "standby" in request:
            return self._stand_by(request)
        if self._hand_over(request, files):
            return None
        program = Program.of(request, files[1:])
        with contextlib.suppress(OSError):
            reply = socket.socket(fileno=os.dup(files[0]))
            if (pid := _fork_quietly()) == 0:
                os.close(files[0])
                reply.close()
                self._close()
                return program
            self._watch(pid, reply)
        return None

    def _stand_by(self, request: Mapping[str, Any]) -> Standby | None:
        """The work of the fork that stands by; None in the server."""
        environment = request["environment"]
        if self._spare_of(environment) is not None:
            return None
        with contextlib.suppress(OSError):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                if (pid := _fork_quietly()) == 0:
                    ours.close()
                    self._close()
                    kept = socket.socket(fileno=os.dup(theirs.fileno()))
                    return Standby(request["standby"], request["arguments"], environment, kept)
            spare = Spare(pid, _pidfd_of(pid), ours, environment)
            self._spares.add(spare)
            self._selector.register(spare.pidfd, selectors.EVENT_READ, spare)
        return None

    def _hand_over(self, request: Mapping[str, Any], files: Sequence[int]) -> bool:
        """Whether the process that stands by runs the program from now on."""
        spare = self._spare_of(request["environment"])
        if spare is None or max(request["targets"], default=0) >= RESERVED_FILES:
            return False
        try:
            socket.send_fds(spare.requests, [json.dumps(request).encode()], files[1:])
            reply = socket.socket(fileno=os.dup(files[0]))
        except OSError:
            self._end(spare)
            return False
        self._forget(spare)
        self._watch(spare.pid, reply)
        return True

    def _spare_of(self, environment: Mapping[str, str]) -> Spare | None:
        found = (each for each in self._spares if _are_alike(each.environment, environment))
        return next(found, None)

    def _end(self, spare: Spare) -> None:
        """Ends a process that stands by, if it has not ended."""
        signal.pidfd_send_signal(spare.pidfd, signal.SIGKILL)
        os.waitpid(spare.pid, 0)
        self._forget(spare)

    def _forget(self, spare: Spare) -> None:
        self._spares.remove(spare)
        self._selector.unregister(spare.pidfd)
        spare.close()

    def _suits(self, environment: Mapping[str, str]) -> bool:
        """Whether modules that were imported with these variables equal the modules of this
        process."""
        return _are_alike(environment, self._imported_with, self._free)

    def _watch(self, pid: int, reply: socket.socket) -> None:
        child = Child(pid, _pidfd_of(pid), reply)
        self._children.add(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.reply, selectors.EVENT_READ, child)
        with contextlib.suppress(OSError):
            socket.send_fds(child.reply, [b"%d" % child.pid], [child.pidfd])

    def _reap(self, child: Child) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        with contextlib.suppress(OSError):
            child.reply.send(b"%d" % status)
        self._selector.unregister(child.pidfd)
        if child.has_client:
            self._selector.unregister(child.reply)
        self._children.discard(child)
        child.close()

    def _leave_behind(self, child: Child) -> None:
        """Ends a child whose client is gone or does not want it any more."""
        self._selector.unregister(child.reply)
        child.has_client = False
        signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)

    def _close(self) -> None:
        """Closes the server's files in a fork."""
        for child in self._children:
            child.close()
        for spare in self._spares:
            spare.close()
        self._selector.close()
        self._requests.close()


def _reserve() -> list[int]:
    """Takes all descriptors that are free below `RESERVED_FILES`."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < RESERVED_FILES:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


def _are_alike(
    one: Mapping[str, str], other: Mapping[str, str], free: frozenset[str] = frozenset()
) -> bool:
    """Whether two environments differ in Headwater's own variables and in free ones alone."""
    return all(
        one.get(name) == other.get(name)
        for name in one.keys() | other.keys()
        if not name.startswith(OWN_PREFIX) and name not in free
    )


def _pidfd_of(pid: int) -> int:
    """The pidfd of a child. Raises `OSError` where there is no room for it, and ends the child
    then, since its end would not be seen."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _run_to_the_end(program: Program | Standby) -> None:
    """Runs a fork's program and ends the process. The interpreter's own end would free all modules
    one by one, 0.09 s of a core; the system frees all at once."""
    status: object = 0
    try:
        program.run()
    except SystemExit as end:
        status = end.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _fork_quietly() -> int:
    with warnings.catch_warnings():
        # NOTE: Python from 3.12 on warns of threads; OpenBLAS has one, and ends it before a fork by
        # a handler.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def main() -> None:
    # The process that started this one holds the other end of REQUESTS, and so do programs that
    # outlive it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests = int(sys.argv[1])
    free_variables = sys.argv[2]
    modules = sys.argv[3:]
    # Imports make no garbage; to look for it took a fifth of their time (2026-11-27).
    gc.disable()
    for module in modules:
        # The program that needs it says what is missing.
        with contextlib.suppress(ImportError):
            import_module(module)
    # Threads that an import has begun are not in a fork, but the locks that they hold are.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    # No later collection looks at what exists now: forks go on sharing its pages.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=requests) as server:
        program = ForkServer(server, frozenset(free_variables.split(","))).serve()
    if program is not None:
        _run_to_the_end(program)


if __name__ == "__main__":
    main()
