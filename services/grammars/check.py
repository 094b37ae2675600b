"""The process that tries to compile grammars; a grammar that takes too much time or memory ends it.

Reads lines of JSON from standard input, `{"folder", "grammar"}` with the model's folder, and
answers each with `{"error"}`, null where the grammar is good. Ends with its input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..runtime.yielding_thread import in_yielding_thread
from .grammars import GrammarError, Grammars, check, fill

COMPILE_SECONDS = 2.0
"""CPU seconds of a grammar, from its text to its first tokens."""
MAX_BYTES = 4 << 30
"""Largest address space in bytes."""
TOO_LONG = f"compiling it takes more than {COMPILE_SECONDS:g} seconds"
TOO_LARGE = "compiling it takes too much memory"
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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    grammars: dict[str, Grammars] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        folder = asked["folder"]
        if folder not in grammars:
            grammars[folder] = Grammars(Path(folder))
        work = functools.partial(verdict_on, grammars[folder], asked["grammar"])
        print(json.dumps({"error": in_yielding_thread(work)}), flush=True)


if __name__ == "__main__":
    main()
