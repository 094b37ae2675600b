"""The process that tries to compile grammars, in forks of itself; a grammar that takes too much
time or memory ends the fork.

Reads lines of JSON from standard input, `{"number", "folder", "grammar", "is_slow"}` with the
model's folder, and answers each: `{"number", "error", "seconds"}`, null where the grammar is good
and the seconds on a processor, or `{"number", "died"}`, the signal that ended the fork.
`{"given_up"}` with the number of a question ends its fork. Ends with its input.
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

from ..runtime.yielding_thread import (
    QUICK_SECONDS,
    ask_for_long_slices,
    lower_priority,
    processor_seconds,
)
from .grammars import GrammarError, Grammars, check, fill, grammars_of

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
    ten small grammars.

    NOTE: it has one thread, which its parent lowers. Of two threads, the last one to end wakes the
    parent before it is gone; where its priority is lower, it may be off the processor then, and
    the parent's call to reap the fork used up a core until it was on again, for up to a second
    beside slow grammars (Linux 6.18, 2026-11-30).
    """

    folder: str
    pid: int
    questions: int
    """Descriptor that takes as much of a question as there is room for."""
    answers: BinaryIO
    unsent: bytes = b""
    """Rest of a question."""
    number: int | None = None
    """Number of the question that it answers; None: it is idle, or ends."""
    began_at: float = 0.0
    """Seconds that it was on a processor before the question."""
    is_lowered: bool = False
    """Whether it has a lowered priority, for good."""
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
        os.set_blocking(questions, False)
        return cls(folder, pid, questions, os.fdopen(answers, "rb"))

    def ask(self, number: int, line: bytes) -> None:
        """Prepares to send a question, which is a line of JSON."""
        self.number = number
        self.began_at = processor_seconds(self.pid)
        self.unsent = line + b"\n"

    def send(self) -> None:
        """Sends as much of the question as there is room for: the fork may have a lowered priority,
        so that it reads late."""
        try:
            self.unsent = self.unsent[os.write(self.questions, self.unsent) :]
        except BrokenPipeError:
            # A signal tells that it is gone.
            self.unsent = b""

    def lower(self) -> None:
        self.is_lowered = True
        lower_priority(self.pid)

    @property
    def is_quick(self) -> bool:
        """Whether it works on a grammar that has not turned out to be slow."""
        return self.number is not None and not self.is_lowered

    @property
    def is_slow(self) -> bool:
        """Whether a grammar has turned out to be slow while its priority is not lowered."""
        return self.is_quick and processor_seconds(self.pid) > self.began_at + QUICK_SECONDS

    @property
    def is_idle(self) -> bool:
        return self.number is None and not self.is_ending

    def reply(self) -> dict[str, Any] | None:
        """Answer to its question; None: it ends, or has ended, without one."""
        if not (line := self.answers.readline()):
            self.is_ending = True
            return None
        answer = json.loads(line)
        self.is_ending |= answer.pop("is_last")
        return self._answered(**answer)

    def last_reply(self, status: int, seconds: float) -> dict[str, Any] | None:
        """Answer to its question, which its end with this status may be, after so many seconds on
        a processor; None: there is none."""
        reply = self.reply() if self.number is not None else None
        if self.number is not None:
            end = {"error": TOO_LONG} if status == -signal.SIGPROF else {"died": -status}
            reply = self._answered(**end, seconds=seconds - self.began_at)
        self.answers.close()
        os.close(self.questions)
        return reply

    def kill(self) -> None:
        self.is_ending = True
        os.kill(self.pid, signal.SIGKILL)

    def _answered(self, **answer: object) -> dict[str, Any]:
        number = self.number
        self.number = None
        return {"number": number, **answer}


def _answer_all(questions: int, answers: int, verdict: Callable[[str], str | None]) -> NoReturn:
    """Answers questions until there are no more, or the fork has computed for long: what a slow
    grammar left in its memory goes with it. It also ends when its parent does."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(questions, "rb") as lines:
            for line in lines:
                began = time.process_time()
                error = verdict(json.loads(line)["grammar"])
                seconds = time.process_time()
                is_last = seconds > FORK_SECONDS
                answer = {"error": error, "seconds": seconds - began, "is_last": is_last}
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
        self._forks: list[Fork] = []
        self._given_up: set[int] = set()
        self._is_over = False
        self._ended, ended = os.pipe()
        """Becomes readable when a fork has ended."""
        os.set_blocking(ended, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # NOTE: not epoll, whose registrations a fork shares.
        self._selector = selectors.PollSelector()
        self._selector.register(questions, selectors.EVENT_READ, self._read)
        self._selector.register(self._ended, selectors.EVENT_READ, self._reap)

    def run(self) -> None:
        """Answers questions until there are no more."""
        while not self._is_over:
            is_any_quick = any(fork.is_quick for fork in self._forks)
            for key, _ in self._selector.select(QUICK_SECONDS / 4 if is_any_quick else None):
                key.data()
            for fork in self._forks:
                if fork.is_slow:
                    fork.lower()

    def _read(self) -> None:
        data = os.read(self._questions, READ_BYTES)
        self._is_over = not data
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        if "given_up" not in message:
            fork = self._fork_for(message["folder"], is_slow=message["is_slow"])
            fork.ask(message["number"], line)
            send = functools.partial(self._send, fork)
            self._selector.register(fork.questions, selectors.EVENT_WRITE, send)
            return
        number = message["given_up"]
        for fork in self._forks:
            if fork.number == number:
                self._given_up.add(number)
                fork.kill()

    def _fork_for(self, folder: str, *, is_slow: bool) -> Fork:
        """An idle fork of the priority for the model, or a new one."""
        idle = [fork for fork in self._forks if fork.is_idle]
        for fork in idle:
            if fork.folder == folder and fork.is_lowered == is_slow:
                return fork
        if len(idle) == MAX_IDLE:
            idle[0].kill()
        fork = Fork.start(folder, grammars_of(Path(folder)))
        if is_slow:
            fork.lower()
        self._forks.append(fork)
        take_answer = functools.partial(self._take_answer, fork)
        self._selector.register(fork.answers, selectors.EVENT_READ, take_answer)
        return fork

    def _send(self, fork: Fork) -> None:
        if fork in self._forks:
            fork.send()
            if not fork.unsent:
                self._selector.unregister(fork.questions)

    def _take_answer(self, fork: Fork) -> None:
        if fork in self._forks:
            if (reply := fork.reply()) is not None:
                self._answer(reply)
            else:
                # The end itself may take long at a lowered priority: a signal tells of it.
                self._selector.unregister(fork.answers)

    def _reap(self) -> None:
        """Takes the last answers of forks that have ended."""
        os.read(self._ended, READ_BYTES)
        for fork in self._forks.copy():
            pid, status, used = os.wait4(fork.pid, os.WNOHANG)
            if pid:
                self._forks.remove(fork)
                for file in (fork.questions, fork.answers):
                    if file in self._selector.get_map():
                        self._selector.unregister(file)
                seconds = used.ru_utime + used.ru_stime
                reply = fork.last_reply(os.waitstatus_to_exitcode(status), seconds)
                if reply is not None:
                    self._answer(reply)

    def _answer(self, reply: dict[str, Any]) -> None:
        if (number := reply["number"]) in self._given_up:
            self._given_up.discard(number)
            reply = {"number": number, "error": GIVEN_UP, "seconds": reply["seconds"]}
        print(json.dumps(reply), flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    # Forks inherit it, and so does the work of starting them.
    ask_for_long_slices()
    Checks(sys.stdin.fileno()).run()


if __name__ == "__main__":
    main()
