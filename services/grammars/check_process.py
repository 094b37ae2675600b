"""The stage's side of one process that checks grammars in forks of itself: requests and replies, a
line each.

All methods block, so they are for threads. The process ends with its input, and so with the stage.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

Verdict = str | None
"""Reason against a grammar; None for a good one."""


class CheckDied(Exception):
    """A process, or its fork for a grammar, that ended instead of answering, and not because it had
    computed for too long."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the process that compiles a grammar ended with status {returncode}")
        self.returncode = returncode

    @property
    def is_of_memory(self) -> bool:
        """Whether the signal is the one of native code that is refused memory or has used up its
        stack. Another process may have sent it, though."""
        return -self.returncode in (signal.SIGABRT, signal.SIGSEGV)


class CheckProcess:
    """A running process. One thread at a time may use it; any thread may call `kill`."""

    def __init__(self) -> None:
        """Starts the process. Raises `OSError` when the system has no room for it."""
        # NOTE: not through uvloop, which forks: of a process that speaks gRPC 3 in 400 children
        # died of SIGSEGV before they had begun (2026-11-21). This starts them by vfork. They have a
        # session of their own, so that a terminal's Ctrl-C reaches the stage alone.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.services.grammars.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self, question: dict[str, str]) -> Verdict:
        """Sends a grammar and waits for the verdict. Raises `CheckDied`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CheckDied(self._process.wait()) from None
        if line := self._process.stdout.readline():
            answer = json.loads(line)
            if "died" in answer:
                raise CheckDied(-answer["died"])
            verdict: Verdict = answer["error"]
            return verdict
        raise CheckDied(self._process.wait())

    def kill(self) -> None:
        """Kills the process; a waiting caller gets `CheckDied`."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process after its last call."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
