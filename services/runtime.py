"""The life of one stage process: logs, readiness, signals, the supervisor's pipe. Knows nothing of its work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import structlog

from .settings import SettingError

READY_FD = "HEADWATER_READY_FD"
"""File descriptor on which a stage writes one JSON line when it is ready: {"stage", "addresses", "pid"}."""
PARENT_FD = "HEADWATER_PARENT_FD"
"""File descriptor that reaches end of file when the supervisor is gone."""
ORPHAN_SECONDS = 1.0
"""What a process has left when its supervisor is gone; then the system ends it, whatever it does."""
INSIST_SECONDS = 5.0
"""After which a task is cancelled again; longer than what any does on its way out."""
ENDED_AT_ONCE = 8
"""Of many tasks that end together."""
Startable = Callable[[Callable[[], None]], Coroutine[Any, Any, None]]


class Lifetime:
    """From start to the request to stop. `stopping` is set by SIGTERM, SIGINT or the loss of the supervisor."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.stopping = asyncio.Event()
        self.orphaned = False
        """The supervisor is gone: leave at once, nobody waits for a drain."""

    def announce(self, **addresses: str) -> None:
        """Says that the stage is ready and where it answers, to the log and to a supervisor that asked for it."""
        structlog.get_logger().info("ready", stage=self.stage, **addresses)
        if READY_FD in os.environ:
            fd = int(os.environ.pop(READY_FD))
            line = {"stage": self.stage, "addresses": addresses, "pid": os.getpid()}
            os.write(fd, json.dumps(line).encode() + b"\n")
            os.close(fd)


@contextlib.asynccontextmanager
async def lifetime(stage: str) -> AsyncIterator[Lifetime]:
    """Scopes a stage's life: inside, signals and the supervisor's pipe set `stopping`."""
    life, loop = Lifetime(stage), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stopping.set)
    parent = int(os.environ[PARENT_FD]) if PARENT_FD in os.environ else None

    def lost_supervisor() -> None:
        if os.read(parent, 1) == b"":  # type: ignore[arg-type]
            loop.remove_reader(parent)  # type: ignore[arg-type]
            signal.setitimer(signal.ITIMER_REAL, ORPHAN_SECONDS)
            life.orphaned = True
            life.stopping.set()

    if parent is not None:
        loop.add_reader(parent, lost_supervisor)
    try:
        yield life
    finally:
        if parent is not None:
            loop.remove_reader(parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def owned_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a background task for the length of a scope; leaving cancels and awaits it.

    A failure of it is logged when it happens, and raised on leaving.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(log_failure)
    try:
        yield task
    finally:
        await end(task)
        if not task.cancelled():
            task.result()


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and returns when all have ended, whatever they ended with. Being cancelled meanwhile ends no wait.

    NOTE: a task may lose its cancellation and go on for ever: before Python 3.12 `asyncio.wait_for` does, when its
    result comes at the same moment, and the NATS client has more such places. So it is cancelled again.
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
        # Asked for, so that nothing is said of a failure that nobody awaits.
        if not task.cancelled():
            task.exception()
    if interruption is not None:
        raise interruption


async def few_at_once(calls: Sequence[Callable[[], Awaitable[None]]], num_at_once: int) -> None:
    """Awaits every call, so many of them at a time, in order. The first error ends the others and is raised."""
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
        self._left, self._loop = deque(calls), asyncio.get_running_loop()
        self._newest: asyncio.Task[None] | None = None
        """The task that has not let the next one start."""
        self.running: dict[asyncio.Task[None], None] = {}
        """In the order of their starts."""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done when all have ended, or one has failed."""

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
    """Awaits every call. A call is given a function by which it lets the next one start; one that ends without having
    called it lets the next one start as well. The first error ends the others and is raised."""
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
    """As `end`, a few tasks at a time: a thousand at once hold up all other work for half a second or more."""
    interruption = None
    for first in range(0, len(tasks), ENDED_AT_ONCE):
        try:
            await end(*tasks[first : first + ENDED_AT_ONCE])
        except asyncio.CancelledError as cancelled:
            interruption = cancelled
    if interruption is not None:
        raise interruption


def log_failure(task: asyncio.Task[Any]) -> None:
    """For tasks that end by being cancelled: another end is a fault that must not stay unseen."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        structlog.get_logger().error("background task failed", task=task.get_name(), exc_info=failure)


def configure_logging(stage: str, level: str = "info") -> None:
    """JSON lines on standard error, each with the stage's name. Raises `SettingError` for a level that is none."""
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise SettingError("log_level", level, "debug, info, warning or error")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(levels[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(stage=stage)


@contextlib.contextmanager
def in_one_line(stage: str, *faults: type[Exception]) -> Iterator[None]:
    """Ends the process with status 1 and a sentence for faults that a person can mend; others show their trace."""
    try:
        yield
    except faults as fault:
        sys.exit(f"headwater {stage}: {fault}")


def run_stage(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a stage to its end on the fastest event loop that is installed."""
    try:
        import uvloop  # noqa: PLC0415 (optional: absent on Windows)

        factory = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(coroutine)
