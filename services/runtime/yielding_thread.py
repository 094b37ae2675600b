"""Native work that turns out to be slow, in a thread that then yields to others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

QUICK_SECONDS = 0.04
"""Seconds on a processor after which work counts as slow."""
LOWERED = 10
"""Nice value of slow work: a tenth of the weight of work that is not nice."""
ResultT = TypeVar("ResultT")


def lower_own_priority() -> None:
    """Lowers the priority of the calling thread for good, and of the threads that it starts."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWERED)


def in_yielding_thread(work: Callable[[], ResultT]) -> ResultT:
    """Returns what `work` returns, or raises what it raises. It runs in a thread of its own, whose
    priority is lowered when it is slow: no thread may raise its own again. NOTE: not for work that
    holds the interpreter, since others would wait for it then. Only Linux has priorities of
    threads; elsewhere they stay."""
    done: Future[ResultT] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)

    thread = threading.Thread(target=run, name="yielding")
    thread.start()
    with contextlib.suppress(OSError):
        while _seconds_of(thread) < QUICK_SECONDS:
            if wait([done], QUICK_SECONDS / 4).done:
                return done.result()
        os.setpriority(os.PRIO_PROCESS, _id_of(thread), LOWERED)
    return done.result()


def _seconds_of(thread: threading.Thread) -> float:
    """Seconds that a thread was on a processor. Raises `OSError` where it has ended, or the system
    does not say."""
    times = Path(f"/proc/self/task/{_id_of(thread)}/schedstat").read_text()
    return int(times.split()[0]) / 1e9


def _id_of(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return thread.native_id
