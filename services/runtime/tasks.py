"""Background tasks: scopes that own them, how they end, and running many of them a few at a
time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import structlog

INSIST_SECONDS = 5.0
"""Seconds after which a task is cancelled again; longer than the clean-up of any task."""
ENDED_AT_ONCE = 8
"""Number of tasks, of many, that are ended together."""
Startable = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def owned_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a background task for the length of a scope; leaving cancels and awaits it.

    A failure of the task is logged when it happens, and raised on leaving.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(log_failure)
    try:
        yield task
    finally:
        await end(task)
        if not task.cancelled():
            task.result()


def start_in(
    tasks: set[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]
) -> asyncio.Task[None]:
    """Starts a background task, which is in `tasks` until it ends. Its failure is logged."""
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(log_failure)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event, at most so long; returns whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and returns when all have ended, with any result. A cancellation of the caller
    does not end the wait.

    NOTE: a task may lose its cancellation and go on for ever: before Python 3.12 `asyncio.wait_for`
    does, when its result comes at the same moment, and the NATS client has more such places. So it
    is cancelled again.
    """
    interruption = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=INSIST_SECONDS)
        except asyncio.CancelledError as cancelled:
            interruption = cancelled
    for task in tasks:
        # The error is read, so that asyncio does not log a failure that is never awaited.
        if not task.cancelled():
            task.exception()
    if interruption is not None:
        raise interruption


async def few_at_once(calls: Sequence[Callable[[], Awaitable[None]]], num_at_once: int) -> None:
    """Awaits every call, at most `num_at_once` of them at a time, in order. The first error ends
    the others and is raised."""
    if len(calls) == 1:
        await calls[0]()
        return
    left = iter(calls)

    async def work() -> None:
        for call in left:
            await call()

    tasks = [asyncio.create_task(work()) for _ in range(min(num_at_once, len(calls)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)


class _Succession:
    """Calls that run at the same time, each in a task of its own, and start one after another."""

    def __init__(self, calls: Iterable[Startable]) -> None:
        self._left = deque(calls)
        self._loop = asyncio.get_running_loop()
        self._newest: asyncio.Task[None] | None = None
        """The task that has not let the next one start."""
        self.running: dict[asyncio.Task[None], None] = {}
        """Running calls in the order of their starts."""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done when all calls have ended, or one has failed."""

    def start(self) -> None:
        if self.over.done():
            return
        if self._left:
            task = self._newest = self._loop.create_task(self._left.popleft()(self._go_on))
            self.running[task] = None
            task.add_done_callback(self._ended)
        elif not self.running:
            self.over.set_result(None)

    def _go_on(self) -> None:
        if asyncio.current_task() is self._newest:
            self._newest = None
            # In the next pass of the event loop: other work goes between two starts.
            self._loop.call_soon(self.start)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self.running[task]
        failure = None if task.cancelled() else task.exception()
        if self.over.done():
            return
        if task.cancelled():
            self.over.cancel()
        elif failure is not None:
            self.over.set_exception(failure)
        elif task is self._newest or not self._left:
            self.start()


async def in_succession(calls: Iterable[Startable]) -> None:
    """Awaits all calls. A call is given a function that starts the next one; a call that ends
    without calling it starts the next one too. The first error cancels the others and is raised."""
    succession = _Succession(calls)
    succession.start()
    try:
        await succession.over
    finally:
        if not succession.over.cancelled():
            # Asked for, since a cancellation that comes at the same moment is raised instead.
            succession.over.exception()
        await _end_in_parts(list(succession.running))


async def _end_in_parts(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Like `end`, a few tasks at a time. A thousand at once would block the event loop for half a
    second."""
    interruption = None
    for first in range(0, len(tasks), ENDED_AT_ONCE):
        try:
            await end(*tasks[first : first + ENDED_AT_ONCE])
        except asyncio.CancelledError as cancelled:
            interruption = cancelled
    if interruption is not None:
        raise interruption


def log_failure(task: asyncio.Task[Any]) -> None:
    """Logs the error of a task that should end only by being cancelled."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        structlog.get_logger().error(
            "background task failed", task=task.get_name(), exc_info=failure
        )
