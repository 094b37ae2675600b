"""The stage's side of the process that checks grammars in forks of itself: questions and answers, a
line each. Checks run beside each other.

All methods block, so they are for threads. The process ends with its input, and so with the stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple, TypedDict

from ..runtime.forked import STAGE_FORKS_FD, ForkClient
from ..runtime.waited_process import WaitedProcess

MODULE = "headwater.services.grammars.check"

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
        theirs, questions = os.pipe()
        answers, writer = os.pipe()
        self._questions = os.fdopen(questions, "wb")
        self._answers = os.fdopen(answers, "rb")
        try:
            self._process = _started(theirs, writer)
        except OSError:
            self._close()
            raise
        finally:
            os.close(theirs)
            os.close(writer)
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
        self._close()

    def _ask(self, question: Question) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._returncode is not None:
                raise CheckDied(self._returncode)
            self._asked[question["number"]] = answer
            self._send(question)
        return answer

    def _send(self, message: Question | dict[str, int]) -> None:
        # If the process is gone, the end of its output ends the wait for the answer.
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(json.dumps(message).encode() + b"\n")
            self._questions.flush()

    def _close(self) -> None:
        for file in (self._questions, self._answers):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def _read(self) -> None:
        """Passes answers on until the process has ended."""
        for line in self._answers:
            answer = json.loads(line)
            self._asked.pop(answer["number"]).set_result(answer)
        returncode = self._process.wait()
        with self._lock:
            self._returncode = returncode
            left = list(self._asked.values())
            self._asked.clear()
        for asked in left:
            asked.set_exception(CheckDied(returncode))


def _started(questions: int, answers: int) -> subprocess.Popen[bytes] | WaitedProcess:
    """The process, in a process group of its own, so that a terminal's Ctrl-C reaches the stage
    alone, and in the stage's session, where nice values count against the stage: by the server of
    forks that the supervisor names, which has read the tokenizer, else in a new interpreter."""
    if (forks := ForkClient.inherited(STAGE_FORKS_FD)) is not None:
        with forks.socket:
            files = {0: questions, 1: answers, 2: sys.stderr.fileno()}
            forked = forks.start_waited(MODULE, [], environment=os.environ, files=files)
        if forked is not None:
            return forked
    # NOTE: not through uvloop, which forks: of a process that speaks gRPC 3 in 400 children died of
    # SIGSEGV before they had begun (2026-11-21). This starts it by vfork.
    command = [sys.executable, "-m", MODULE]
    return subprocess.Popen(command, stdin=questions, stdout=answers, process_group=0)
