"""The process that tries to compile grammars, each in a fork of itself; a grammar that takes too
much time or memory ends the fork.

Reads lines of JSON from standard input, `{"folder", "grammar"}` with the model's folder, and
answers each with `{"error"}`, null where the grammar is good, or with `{"died"}`, the signal that
ended the fork. Ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
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


def in_fork(work: Callable[[], str | None]) -> dict[str, Any]:
    """The answer that `work` in a fork of this process leads to. What this process has read stays
    ready for the next one, whatever becomes of the fork. NOTE: this process has one thread, and
    compiles nothing itself."""
    answer, written = os.pipe()
    if not (pid := os.fork()):
        _answer(written, work)
    os.close(written)
    with os.fdopen(answer, "rb") as reader:
        reply = reader.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGPROF:
        return {"error": TOO_LONG}
    if status:
        return {"died": -status}
    found: dict[str, Any] = json.loads(reply)
    return found


def _answer(written: int, work: Callable[[], str | None]) -> NoReturn:
    """Writes the verdict and ends the fork, which also ends when its parent does."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.write(written, json.dumps({"error": in_yielding_thread(work)}).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    grammars: dict[str, Grammars] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        folder = asked["folder"]
        if folder not in grammars:
            grammars[folder] = Grammars(Path(folder))
        work = functools.partial(verdict_on, grammars[folder], asked["grammar"])
        print(json.dumps(in_fork(work)), flush=True)


if __name__ == "__main__":
    main()
