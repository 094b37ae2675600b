"""Which work loses its priority, and what comes of work in a thread of its own."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from headwater.services.runtime.yielding_thread import LOWERED, in_yielding_thread


def own_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_returns_and_raises_as_a_call_does() -> None:
    assert in_yielding_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_yielding_thread(lambda: 1 // 0)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_work_that_computes_for_long_loses_priority_and_work_that_waits_does_not() -> None:
    before = own_priority()

    def compute() -> int:
        until = time.monotonic() + 60
        while own_priority() == before and time.monotonic() < until:
            pass
        return own_priority()

    def pause() -> int:
        time.sleep(0.2)
        return own_priority()

    assert in_yielding_thread(compute) == LOWERED
    assert in_yielding_thread(pause) == before
    assert own_priority() == before


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_work_of_a_tenth_of_a_second_has_lost_its_priority_before_its_end() -> None:
    """A schema of 2,000 alternatives took two thirds of its time before others."""
    before = own_priority()

    def compute() -> float:
        until = time.monotonic() + 60
        while own_priority() == before and time.monotonic() < until:
            pass
        return time.thread_time()

    # A busy machine lets the work go on for longer, but not each time.
    assert any(in_yielding_thread(compute) < 0.08 for _ in range(30))
