"""Work on bodies: on the event loop, or in threads that tenants share where a body is long."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

from headwater.services.runtime.fair_queue import QueueLimits
from headwater.services.runtime.fair_threads import FairThreads

LONG_BODY_BYTES = 64 * 1024
"""Bodies of this size and more are decoded in threads, since they cost milliseconds in which other
requests would wait."""
LIMITS = QueueLimits(num_waiting=1024, num_bytes=256 << 20, wait_seconds=15.0)
NUM_NATIVE_THREADS = 3
_AS_USUAL = contextlib.nullcontext()
ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


class LongWork:
    """One thread for work that holds the interpreter, a few for work that does not. NOTE: several
    of the first kind would take the interpreter from the event loop in turns: beside eight bodies
    of 1,024 prompts ten passes of it took 280 ms with six threads and 30 with one, which switched
    each millisecond (2026-11-22).
    """

    def __init__(self) -> None:
        self._thread = FairThreads("the gateway's thread for long bodies", 1, LIMITS)
        self._native = FairThreads("the gateway's compression", NUM_NATIVE_THREADS, LIMITS)

    async def by_size(
        self,
        tenant: str,
        num_bytes: int,
        work: Callable[ArgsT, ResultT],
        *args: ArgsT.args,
        **named: ArgsT.kwargs,
    ) -> ResultT:
        """Returns what `work` returns. It runs in the thread where the body is long, in the turn of
        the tenant. Raises `LimitExceeded` or `Unavailable` where it cannot wait for that."""
        if num_bytes < LONG_BODY_BYTES:
            return work(*args, **named)
        return await self._thread.run(tenant, num_bytes, functools.partial(work, *args, **named))

    async def native(self, tenant: str, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Like `by_size`, for work that releases the interpreter lock, whatever its size."""
        return await self._native.run(tenant, num_bytes, work)

    def close(self) -> None:
        """Work that has not begun is given up."""
        self._thread.close()
        self._native.close()


def without_collector(num_bytes: int) -> AbstractContextManager[None]:
    """A scope without garbage collection, where the body is long: of a million lists in 4 MB it
    takes four fifths of the time (0.53 s instead of 0.12, 2026-11-22), and finds nothing."""
    return _without_collector() if num_bytes >= LONG_BODY_BYTES else _AS_USUAL


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
