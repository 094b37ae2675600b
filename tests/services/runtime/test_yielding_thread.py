"""Which work loses its priority, and what comes of work in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from headwater.services.runtime.fair_threads import FairThreads
from headwater.services.runtime.yielding_thread import (
    LOWERED,
    LOWERED_SLICE_NANOSECONDS,
    SLICE_NANOSECONDS,
    in_yielding_thread,
    lower_own_priority,
    processor_seconds,
)
from tests.time_slice import slice_of_this_thread


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


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are Linux's")
def test_the_seconds_of_a_process_on_processors_are_known_until_it_is_gone() -> None:
    assert 0 < processor_seconds(os.getpid()) <= time.process_time()
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert processor_seconds(ended.pid) == 0


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


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_a_thread_that_wakes_up_takes_the_processor_from_slow_work_at_once() -> None:
    """By its longer slice: a nice value alone let an event loop wait for 1 to 3 ms each time."""
    before = slice_of_this_thread()
    if before == 0:
        pytest.skip("this kernel knows no slices of threads")
    seen = []

    def lower() -> None:
        lower_own_priority()
        starting = threading.Thread(target=lambda: seen.append(slice_of_this_thread()))
        starting.start()
        starting.join()
        seen.append(slice_of_this_thread())

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert seen == [LOWERED_SLICE_NANOSECONDS] * 2
    assert in_yielding_thread(slice_of_this_thread) == SLICE_NANOSECONDS
    assert in_yielding_thread(own_priority) == own_priority()
    assert in_yielding_thread(own_priority, is_slow=True) == LOWERED
    # Quick work goes before slow work, too.
    assert slice_of_this_thread() == before < SLICE_NANOSECONDS < LOWERED_SLICE_NANOSECONDS


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
async def test_threads_that_tenants_share_let_waking_threads_go_before_them() -> None:
    if slice_of_this_thread() == 0:
        pytest.skip("this kernel knows no slices of threads")
    with contextlib.closing(FairThreads("a thread", 1)) as threads:
        assert await threads.run("a", 1, slice_of_this_thread) == SLICE_NANOSECONDS
