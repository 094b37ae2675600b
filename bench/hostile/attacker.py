"""The process that attacks. It yields to the cluster: in service a hostile client computes on a
machine of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from .attack import Target, run_for
from .bodies import named

NICENESS = 10


@contextmanager
def attacker() -> Iterator[ProcessPoolExecutor]:
    """One process, in which `prepare` and `attack` are to run."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(NICENESS,)
    ) as process:
        yield process


def prepare(name: str, model: str) -> None:
    """Builds what takes long to build of a hostile body."""
    named(name).attack.prepare(model)


def attack(name: str, target: Target, seconds: float) -> Counter[str]:
    """Sends a hostile body for so many seconds; returns the outcomes."""
    return asyncio.run(run_for(named(name).attack, target, seconds))
