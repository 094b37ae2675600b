"""Threads that tenants share fairly: work waits for a place of a `FairQueue`, then runs in a
thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from .errors import Unavailable
from .fair_queue import FairQueue, QueueLimits
from .yielding_thread import ask_for_long_slices

STAGE_BUSY = "stage_busy"
"""Code of the error of work that waited too long."""
SWITCH_SECONDS = 0.0002
"""Seconds after which a thread of a stage lets another one run: the event loop waits so long for
each pass beside work that holds the interpreter. Python's own default is 5 ms.
With 1 ms five passes took 3.2 ms longer than alone, with this 0.5 (2026-11-30)."""
MUCH_SECONDS = 0.3
"""Seconds of work of late, halved every `HALF_LIFE_SECONDS`, from which on a tenant has had much: a
tenth of a core."""
HALF_LIFE_SECONDS = 2.0
MAX_KNOWN = 4096
"""Number of tenants whose use is kept."""
ResultT = TypeVar("ResultT")
_Turn = asyncio.Future[None]


class FairThreads:
    """A thread for each place. The wait for a place is bounded, and is no part of the work: a limit
    on the work begins with the work."""

    def __init__(self, name: str, num_threads: int, limits: QueueLimits | None = None) -> None:
        """`name`, in errors, is what the work waits for."""
        self._name = name
        self._limits = limits or QueueLimits()
        self._queue: FairQueue[_Turn] = FairQueue(name, num_threads, self._limits)
        self._used: dict[str, tuple[float, float]] = {}
        """Seconds of late by tenant, and when they were counted."""
        self._pool = ThreadPoolExecutor(num_threads, name, ask_for_long_slices)

    async def run(
        self,
        tenant: str,
        num_bytes: int,
        work: Callable[[], ResultT],
        *,
        on_begin: Callable[[], None] = lambda: None,
        computed: Callable[[ResultT], float] | None = None,
    ) -> ResultT:
        """Returns what `work` returns. `on_begin` is called on the event loop when the turn has
        come. `computed` returns the seconds that work with this result was on a processor, for
        `has_had_much`; without it they are those that the work took. Raises `LimitExceeded` when
        too much of the tenant's work waits, `Unavailable` when the turn does not come in time. Work
        whose caller is cancelled keeps its place to its end."""
        await self._turn(tenant, num_bytes)
        on_begin()
        loop = asyncio.get_running_loop()
        began = time.perf_counter()

        def on_end(ended: Future[ResultT]) -> None:
            seconds = used = time.perf_counter() - began
            if computed is not None and not ended.cancelled() and ended.exception() is None:
                used = computed(ended.result())
            # The loop may be closed where the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, tenant, seconds, used)

        within = functools.partial(contextvars.copy_context().run, work)
        running = self._pool.submit(within)
        running.add_done_callback(on_end)
        return await asyncio.wrap_future(running)

    def has_had_much(self, tenant: str) -> bool:
        """Whether the tenant's work took much time of late: its next is better done with a lowered
        priority from its beginning."""
        return self._used_of_late(tenant) > MUCH_SECONDS

    def _used_of_late(self, tenant: str) -> float:
        seconds, at = self._used.get(tenant, (0.0, 0.0))
        return float(seconds * 0.5 ** ((time.monotonic() - at) / HALF_LIFE_SECONDS))

    def close(self, *, wait: bool = False) -> None:
        """Ends the threads. Work that has not begun is not done."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    async def _turn(self, tenant: str, num_bytes: int) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._queue.add(tenant, turn, num_bytes)
        self._give_turns()
        if turn.done():
            return
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await turn
        except BaseException as interruption:
            if not self._queue.remove(tenant, turn):
                # The turn came at the same moment.
                self._end(tenant, 0.0, 0.0)
            if isinstance(interruption, TimeoutError):
                raise self._busy() from None
            raise

    def _give_turns(self) -> None:
        while (turn := self._queue.next()) is not None:
            if not turn.done():
                turn.set_result(None)

    def _end(self, tenant: str, seconds: float, used: float) -> None:
        self._used[tenant] = self._used_of_late(tenant) + used, time.monotonic()
        if len(self._used) > MAX_KNOWN:
            self._used = {
                name: used for name, used in self._used.items() if self.has_had_much(name)
            }
        self._queue.end(tenant, seconds)
        self._give_turns()

    def _busy(self) -> Unavailable:
        seconds = self._limits.wait_seconds
        return Unavailable(
            f"no turn for {self._name} came within {seconds:g} s",
            retry_after=seconds,
            code=STAGE_BUSY,
        )
