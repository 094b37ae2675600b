"""The process that attacks. It yields to the cluster: in service a hostile client computes on a
machine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from headwater.services.runtime.yielding_thread import LOWERED, lower_own_priority

from .attack import Target, run_for
from .bodies import named

SESSION_NICENESS = Path("/proc/self/autogroup")
"""Linux divides processors among sessions first, where it has no control groups: this is the nice
value of a session, within which those of processes count."""


@contextmanager
def attacker(cores: frozenset[int]) -> Iterator[ProcessPoolExecutor]:
    """One process on these cores, in which `prepare` and `attack` are to run."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=yield_to_others, initargs=(cores,)) as process:
        yield process


def yield_to_others(cores: frozenset[int]) -> None:
    """Lowers the priority of this process, in a session of its own, and lets threads that wake up
    go before it: with equal slices each wake-up of a server waited up to 3 ms for it."""
    os.sched_setaffinity(0, cores)
    os.setsid()
    lower_own_priority()
    with contextlib.suppress(OSError):
        SESSION_NICENESS.write_text(str(LOWERED))


def prepare(name: str, model: str) -> None:
    """Builds what takes long to build of a hostile body."""
    named(name).attack.prepare(model)


def attack(name: str, target: Target, seconds: float) -> Counter[str]:
    """Sends a hostile body for so many seconds; returns the outcomes."""
    return _runner().run(run_for(named(name).attack, target, seconds))


@cache
def _runner() -> asyncio.Runner:
    """Event loop of all attacks. NOTE: gRPC (1.85) reports ends of calls to the loop that started
    them even later; each report to a closed loop is a traceback, which took time from attacks."""
    return asyncio.Runner()
