"""The process that tries to compile grammars, each in a fork of itself; a grammar that takes too
much time or memory ends the fork.

Reads lines of JSON from standard input, `{"number", "folder", "grammar"}` with the model's folder,
and answers each when its fork has ended: `{"number", "error"}`, null where the grammar is good, or
`{"number", "died"}`, the signal that ended the fork. `{"given_up"}` with the number of a question
ends its fork. Ends with its input.
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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..runtime.yielding_thread import in_yielding_thread
from .grammars import GrammarError, Grammars, check, fill

COMPILE_SECONDS = 2.0
"""CPU seconds of a grammar, from its text to its first tokens."""
MAX_BYTES = 4 << 30
"""Largest address space in bytes."""
TOO_LONG = f"compiling it takes more than {COMPILE_SECONDS:g} seconds"
TOO_LARGE = "compiling it takes too much memory"
GIVEN_UP = "the request is gone"
READ_BYTES = 1 << 16
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


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork that tries a grammar, and the question that it answers."""

    number: int
    """Number of the question."""
    pid: int
    reader: int
    """Descriptor of its answer."""

    @classmethod
    def start(cls, number: int, work: Callable[[], str | None]) -> Fork:
        """Does the work in a fork of this process. NOTE: this process has one thread, and compiles
        nothing itself."""
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            _answer(writer, work)
        os.close(writer)
        return cls(number, pid, reader)

    def reply(self) -> dict[str, Any]:
        """The answer that the fork leads to, once it has ended or written it."""
        with os.fdopen(self.reader, "rb") as reader:
            written = reader.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == -signal.SIGPROF:
            return {"number": self.number, "error": TOO_LONG}
        if status:
            return {"number": self.number, "died": -status}
        return {"number": self.number, "error": json.loads(written)}


def _answer(writer: int, work: Callable[[], str | None]) -> NoReturn:
    """Writes the verdict and ends the fork, which also ends when its parent does."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.write(writer, json.dumps(in_yielding_thread(work)).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Checks:
    """Forks that run at the same time. What this process has read stays loaded for later checks,
    however a fork ends."""

    def __init__(self, questions: int) -> None:
        """`questions` is the descriptor from which lines are read."""
        self._questions = questions
        self._unfinished = b""
        """Beginning of a line whose end has not come."""
        self._grammars: dict[str, Grammars] = {}
        self._forks: dict[int, Fork] = {}
        """Forks that run, by the numbers of their questions."""
        self._given_up: set[int] = set()
        # NOTE: not epoll, whose registrations a fork shares.
        self._selector = selectors.PollSelector()
        self._selector.register(questions, selectors.EVENT_READ)

    def run(self) -> None:
        """Answers questions until there are no more."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._end(key.data)
                elif data := os.read(self._questions, READ_BYTES):
                    *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                else:
                    return

    def _take(self, message: dict[str, Any]) -> None:
        if "given_up" not in message:
            self._begin(message)
        elif fork := self._forks.get(message["given_up"]):
            self._given_up.add(fork.number)
            os.kill(fork.pid, signal.SIGKILL)

    def _begin(self, asked: dict[str, Any]) -> None:
        folder = asked["folder"]
        if folder not in self._grammars:
            self._grammars[folder] = Grammars(Path(folder))
        work = functools.partial(verdict_on, self._grammars[folder], asked["grammar"])
        fork = Fork.start(asked["number"], work)
        self._forks[fork.number] = fork
        self._selector.register(fork.reader, selectors.EVENT_READ, fork)

    def _end(self, fork: Fork) -> None:
        self._selector.unregister(fork.reader)
        del self._forks[fork.number]
        reply = fork.reply()
        if fork.number in self._given_up:
            self._given_up.discard(fork.number)
            reply = {"number": fork.number, "error": GIVEN_UP}
        print(json.dumps(reply), flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    Checks(sys.stdin.fileno()).run()


if __name__ == "__main__":
    main()
