"""Native work that turns out to be slow, in a thread or a process that then yields to others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

QUICK_SECONDS = 0.04
"""Seconds on a processor after which work counts as slow."""
LOWERED = 10
"""Nice value of slow work: a tenth of the weight of work that is not nice."""
SLICE_NANOSECONDS = 5_000_000
"""Time slice that long work asks for. A thread that wakes up takes the processor at once from one
with a longer slice (Linux from 6.12 on). With equal slices it waits up to 3 ms, whatever the nice
values, in each process that a request goes through."""
LOWERED_SLICE_NANOSECONDS = 20_000_000
"""The same of slow work. Longer, since threads of equal slices wait for each other: the quick
grammars of a tenant would wait 20 ms at each wake-up where slow ones have all cores."""
KEEP_POLICY = 8
_CLOCK_OF_PROCESS = 2
_CLOCK_OF_THREAD = 6
"""Kinds of the clocks that clock_getcpuclockid(3) returns."""
ResultT = TypeVar("ResultT")


class SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), in its first version."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


_LIBC = ctypes.CDLL(None)
_SET_ATTR = {("linux", "x86_64"): 314, ("linux", "aarch64"): 274}.get(
    (sys.platform, platform.machine())
)
"""Number of sched_setattr(2), which older C libraries do not offer."""


def ask_for_long_slices() -> None:
    """Lets threads that wake up go before the calling thread and those that it starts, which get
    the same share of processors as before."""
    ask_for_slices(SLICE_NANOSECONDS)


def ask_for_slices(nanoseconds: int) -> None:
    """Asks for slices of a length for the calling thread and those that it starts; 0: the usual
    ones. When it wakes up it goes before threads with longer ones."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        _schedule(0, nice, nanoseconds)


def lower_own_priority() -> None:
    """Lowers the priority of the calling thread for good, and of the threads that it starts."""
    if sys.platform == "linux":
        lower_priority(threading.get_native_id())


def in_yielding_thread(work: Callable[[], ResultT], *, is_slow: bool = False) -> ResultT:
    """Returns what `work` returns, or raises what it raises. It runs in a thread of its own, whose
    priority is lowered when it is slow, or at once where it counts as slow already: no thread may
    raise its own again. NOTE: not for work that
    holds the interpreter, since others would wait for it then. Only Linux has priorities of
    threads; elsewhere they stay."""
    done: Future[ResultT] = Future()

    def run() -> None:
        if is_slow:
            lower_own_priority()
        else:
            ask_for_long_slices()
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)

    thread = threading.Thread(target=run, name="yielding")
    thread.start()
    with contextlib.suppress(OSError):
        while not is_slow and _seconds_of(thread) < QUICK_SECONDS:
            if wait([done], QUICK_SECONDS / 4).done:
                return done.result()
        if not is_slow:
            lower_priority(_id_of(thread))
    return done.result()


def lower_priority(thread_id: int) -> None:
    """Lowers the priority of a thread for good; a process with one thread has its id. Raises
    `OSError` where the thread has ended."""
    os.setpriority(os.PRIO_PROCESS, thread_id, LOWERED)
    _schedule(thread_id, LOWERED, LOWERED_SLICE_NANOSECONDS)


def _schedule(thread_id: int, nice: int, slice_nanoseconds: int) -> None:
    """Asks for slices of a length, beside a nice value; older systems pass over it."""
    if _SET_ATTR is not None:
        attr = SchedAttr(ctypes.sizeof(SchedAttr), flags=KEEP_POLICY, nice=nice)
        attr.runtime = slice_nanoseconds
        _LIBC.syscall(_SET_ATTR, thread_id, ctypes.byref(attr), 0)


def processor_seconds(process_id: int) -> float:
    """Seconds that a process was on processors; 0 where it is gone, or the system does not say."""
    try:
        return time.clock_gettime(~process_id << 3 | _CLOCK_OF_PROCESS)
    except OSError:
        return 0.0


def _seconds_of(thread: threading.Thread) -> float:
    """Seconds that a thread was on a processor. Raises `OSError` where it has ended, or the system
    does not say."""
    return time.clock_gettime(~_id_of(thread) << 3 | _CLOCK_OF_THREAD)


def _id_of(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return thread.native_id
