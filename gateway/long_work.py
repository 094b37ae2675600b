"""Work on a request's body: on the event loop, or in a thread where the body is long."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

SWITCH_SECONDS = 0.001
"""Seconds after which a thread lets another one run: the event loop waits so long for each pass
beside long work."""
LONG_BODY_BYTES = 64 * 1024
"""From this size on a body costs milliseconds, which other requests spend beside it and not behind
it."""
_AS_USUAL = contextlib.nullcontext()
ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


class LongWork:
    """One thread. NOTE: several would take the interpreter from the event loop in turns: beside
    eight bodies of 1,024 prompts ten passes of it took 280 ms with six threads and 30 with one,
    which switches each millisecond (2026-11-22).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long-work")

    async def by_size(
        self,
        num_bytes: int,
        work: Callable[ArgsT, ResultT],
        *args: ArgsT.args,
        **named: ArgsT.kwargs,
    ) -> ResultT:
        """Returns what `work` returns. It runs in the thread where the body is long."""
        if num_bytes < LONG_BODY_BYTES:
            return work(*args, **named)
        context = contextvars.copy_context()
        within = functools.partial(context.run, work, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, within)

    def close(self) -> None:
        """Work that has not begun is given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)


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
