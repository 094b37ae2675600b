"""The stage's side of the process that checks grammars in forks of itself: questions and answers, a
line each. Checks run beside each other.

All methods block, so they are for threads. The process ends with its input, and so with the stage.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple, TypedDict

Verdict = str | None
"""Reason against a grammar; None for a good one."""


class Question(TypedDict):
    number: int
    """Different from all earlier numbers of one process."""
    folder: str
    """The model's folder."""
    grammar: str
    is_slow: bool
    """Whether it is checked with a lowered priority from its beginning."""


class Checked(NamedTuple):
    verdict: Verdict
    computed_seconds: float
    """Time on a processor."""


class CheckDied(Exception):
    """A process, or its fork for a grammar, that ended instead of answering, and not because it had
    computed for too long."""

    def __init__(self, returncode: int, computed_seconds: float = 0.0) -> None:
        super().__init__(f"the process that compiles a grammar ended with status {returncode}")
        self.returncode = returncode
        self.computed_seconds = computed_seconds
        """Time of the grammar on a processor, where it is known."""

    @property
    def is_of_memory(self) -> bool:
        """Whether the signal is one that native code gets when it is refused memory or overflows
        its stack. Another process may also have sent it."""
        return -self.returncode in (signal.SIGABRT, signal.SIGSEGV)


class CheckProcess:
    """A running process. Any thread may use it."""

    def __init__(self) -> None:
        """Starts the process. Raises `OSError` when the system has no room for it."""
        # NOTE: not through uvloop, which forks: of a process that speaks gRPC 3 in 400 children
        # died of SIGSEGV before they had begun (2026-11-21). This starts it by vfork. It has a
        # process group of its own, so that a terminal's Ctrl-C reaches the stage alone, in the
        # stage's session, where nice values count against the stage.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.services.grammars.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._lock = threading.Lock()
        """Held while a question is sent, and while the end is noted: no question comes after it."""
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._returncode: int | None = None
        """Exit status, once no answer can come any more."""
        self._reader = threading.Thread(target=self._read, name="verdicts", daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._returncode is None and self._process.poll() is None

    def check(self, question: Question) -> Checked:
        """Sends a grammar and waits for the verdict. Raises `CheckDied`."""
        answer = self._ask(question).result()
        if "died" in answer:
            raise CheckDied(-answer["died"], answer["seconds"])
        return Checked(answer["error"], answer["seconds"])

    def give_up(self, number: int) -> None:
        """Ends the check of this number, whose verdict is not wanted any more."""
        with self._lock:
            self._send({"given_up": number})

    def end(self) -> None:
        """Kills the process; waiting callers get `CheckDied`."""
        self._process.kill()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def _ask(self, question: Question) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._returncode is not None:
                raise CheckDied(self._returncode)
            self._asked[question["number"]] = answer
            self._send(question)
        return answer

    def _send(self, message: Question | dict[str, int]) -> None:
        assert self._process.stdin is not None
        # If the process is gone, the end of its output ends the wait for the answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        """Passes answers on until the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._asked.pop(answer["number"]).set_result(answer)
        returncode = self._process.wait()
        with self._lock:
            self._returncode = returncode
            left = list(self._asked.values())
            self._asked.clear()
        for asked in left:
            asked.set_exception(CheckDied(returncode))
