"""Measures for how long native code keeps other threads of the process from running."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable

from headwater.services.runtime.fair_threads import SWITCH_SECONDS

BEAT_SECONDS = 0.0002


def longest_hold(work: Callable[[], object], allowed: float, *, tries: int = 30) -> float:
    """Most processor seconds that `work` used between two beats of another thread: of the first try
    that stays within `allowed`, or the least of all. A busy machine lengthens a gap of one try,
    native code that of all."""
    longest = math.inf
    for _ in range(tries):
        longest = min(longest, _longest_gap(work))
        if longest <= allowed:
            break
    return longest


def _longest_gap(work: Callable[[], object]) -> float:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    may_begin = threading.Event()

    ends = []

    def run() -> None:
        may_begin.wait()
        work()
        ends.append(time.thread_time())

    worker = threading.Thread(target=run)
    worker.start()
    assert worker.ident is not None
    clock = time.pthread_getcpuclockid(worker.ident)
    may_begin.set()
    used = longest = 0.0
    try:
        while not ends:
            now = time.clock_gettime(clock)
            longest = max(longest, now - used)
            used = now
            time.sleep(BEAT_SECONDS)
    finally:
        worker.join()
        sys.setswitchinterval(before)
    return max(longest, ends[0] - used)
