"""The process that tries to compile grammars, in forks of itself; a grammar that takes too much
time or memory ends the fork.

Reads lines of JSON from standard input, `{"number", "folder", "grammar", "is_slow"}` with the model's folder,
and answers each: `{"number", "error"}`, null where the grammar is good, or `{"number", "died"}`, the
signal that ended the fork. `{"given_up"}` with the number of a question ends its fork. Ends with its
input.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from ..runtime.yielding_thread import ask_for_long_slices, in_yielding_thread
from .grammars import GrammarError, Grammars, check, fill

COMPILE_SECONDS = 2.0
"""CPU seconds of a grammar, from its text to its first tokens."""
MAX_BYTES = 4 << 30
"""Largest address space in bytes."""
TOO_LONG = f"compiling it takes more than {COMPILE_SECONDS:g} seconds"
TOO_LARGE = "compiling it takes too much memory"
GIVEN_UP = "the request is gone"
READ_BYTES = 1 << 16
FORK_SECONDS = 0.25
"""CPU seconds after which a fork ends with its answer; to start one takes about 0.015."""
MAX_IDLE = 4
"""Forks that wait for a grammar, of all models."""
PR_SET_PDEATHSIG = 1
NUM_TRIED = 16
"""Number of tokens that are taken as a trial: a grammar that explodes mostly does so at once."""
TRIED_SHARES = (0.0, 0.5, 0.999)
"""Trials: each takes the token at this share of the allowed ones, every time."""


def try_grammar(grammars: Grammars, grammar: str) -> None:
    """Compiles a grammar and takes some tokens. Raises `GrammarError`."""
    start = grammars.compile(grammar)
    mask = np.zeros(grammars.num_words, np.int32)
    for share in TRIED_SHARES:
        matcher = start.deep_copy()
        for _ in range(NUM_TRIED):
            fill(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            matcher.consume_token(int(allowed[int(share * len(allowed))]))
            check(matcher)
            if matcher.is_stopped():
                break


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Scope that ends the process by SIGPROF, in native code too, when it takes more CPU time than
    that."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def verdict_on(grammars: Grammars, grammar: str) -> str | None:
    """Reason against a grammar; None for a good one."""
    try:
        with limited(COMPILE_SECONDS):
            try_grammar(grammars, grammar)
    except GrammarError as fault:
        return str(fault)
    except MemoryError:
        return TOO_LARGE
    return None


@dataclass(slots=True, eq=False)
class Fork:
    """A fork that tries grammars for one model, one after another: to start one takes as long as
    ten small grammars."""

    folder: str
    pid: int
    questions: BinaryIO
    answers: BinaryIO
    number: int | None = None
    """Number of the question that it answers; None: it is idle, or ends."""
    is_ending: bool = False

    @classmethod
    def start(cls, folder: str, grammars: Grammars) -> Fork:
        """NOTE: this process has one thread, and compiles nothing itself."""
        theirs, questions = os.pipe()
        answers, writer = os.pipe()
        if not (pid := os.fork()):
            os.close(questions)
            _answer_all(theirs, writer, functools.partial(verdict_on, grammars))
        os.close(theirs)
        os.close(writer)
        return cls(folder, pid, os.fdopen(questions, "wb"), os.fdopen(answers, "rb"))

    def ask(self, question: dict[str, Any]) -> None:
        self.number = question["number"]
        # The end of its answers tells that it is gone.
        with contextlib.suppress(BrokenPipeError):
            self.questions.write(json.dumps(question).encode() + b"\n")
            self.questions.flush()

    def reply(self) -> dict[str, Any] | None:
        """Answer to its question, which its end may be; None: it ended without one."""
        number = self.number
        self.number = None
        if line := self.answers.readline():
            answer = json.loads(line)
            self.is_ending = answer["is_last"]
            return {"number": number, "error": answer["error"]}
        self.is_ending = True
        status = self._end()
        if number is None:
            return None
        if status == -signal.SIGPROF:
            return {"number": number, "error": TOO_LONG}
        return {"number": number, "died": -status}

    @property
    def is_idle(self) -> bool:
        return self.number is None and not self.is_ending

    @property
    def has_ended(self) -> bool:
        return self.answers.closed

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _end(self) -> int:
        self.answers.close()
        with contextlib.suppress(BrokenPipeError):
            self.questions.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _answer_all(questions: int, answers: int, verdict: Callable[[str], str | None]) -> NoReturn:
    """Answers questions until there are no more, or the fork has computed for long: what a slow
    grammar left in its memory goes with it. It also ends when its parent does."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(questions, "rb") as lines:
            for line in lines:
                question = json.loads(line)
                work = functools.partial(verdict, question["grammar"])
                error = in_yielding_thread(work, is_slow=question["is_slow"])
                is_last = time.process_time() > FORK_SECONDS
                answer = {"error": error, "is_last": is_last}
                os.write(answers, json.dumps(answer).encode() + b"\n")
                if is_last:
                    break
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Checks:
    """Forks that run at the same time. What this process has read stays loaded for later forks,
    however one ends."""

    def __init__(self, questions: int) -> None:
        """`questions` is the descriptor from which lines are read."""
        self._questions = questions
        self._unfinished = b""
        """Beginning of a line whose end has not come."""
        self._grammars: dict[str, Grammars] = {}
        self._forks: list[Fork] = []
        self._given_up: set[int] = set()
        # NOTE: not epoll, whose registrations a fork shares.
        self._selector = selectors.PollSelector()
        self._selector.register(questions, selectors.EVENT_READ)

    def run(self) -> None:
        """Answers questions until there are no more."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._take_answer(key.data)
                elif data := os.read(self._questions, READ_BYTES):
                    *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                else:
                    return

    def _take(self, message: dict[str, Any]) -> None:
        if "given_up" not in message:
            self._fork_for(message["folder"]).ask(message)
            return
        number = message["given_up"]
        for fork in self._forks:
            if fork.number == number:
                self._given_up.add(number)
                fork.kill()

    def _fork_for(self, folder: str) -> Fork:
        """An idle fork for the model, or a new one."""
        idle = [fork for fork in self._forks if fork.is_idle]
        for fork in idle:
            if fork.folder == folder:
                return fork
        if len(idle) == MAX_IDLE:
            idle[0].is_ending = True
            idle[0].kill()
        if folder not in self._grammars:
            self._grammars[folder] = Grammars(Path(folder))
        fork = Fork.start(folder, self._grammars[folder])
        self._forks.append(fork)
        self._selector.register(fork.answers, selectors.EVENT_READ, fork)
        return fork

    def _take_answer(self, fork: Fork) -> None:
        # A selector looks up files by their descriptor, which ends with the fork.
        key = self._selector.get_key(fork.answers)
        reply = fork.reply()
        if fork.has_ended:
            self._selector.unregister(key.fd)
            self._forks.remove(fork)
        if reply is None:
            return
        if (number := reply["number"]) in self._given_up:
            self._given_up.discard(number)
            reply = {"number": number, "error": GIVEN_UP}
        print(json.dumps(reply), flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    # Forks inherit it, and so does the work of starting them.
    ask_for_long_slices()
    Checks(sys.stdin.fileno()).run()


if __name__ == "__main__":
    main()
