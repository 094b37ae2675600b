"""The life of one stage process: logs, readiness, signals, the supervisor's pipe. Knows nothing
about its work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TextIO, cast

import structlog

from . import collector
from .best_effort_file import BestEffortFile
from .settings import check_log_level
from .version import RELEASE, commit

READY_FD = "HEADWATER_READY_FD"
"""File descriptor on which a stage writes one JSON line when it is ready: {"stage", "addresses",
"pid", "children"}."""
PARENT_FD = "HEADWATER_PARENT_FD"
"""File descriptor that reaches end of file when the supervisor is gone."""
ORPHAN_SECONDS = 1.0
"""Seconds that a process has when its supervisor is gone; then the system ends it."""


class Lifetime:
    """Life of a process up to the request to stop. `stopping` is set by SIGTERM, SIGINT or the loss
    of the supervisor."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.stopping = asyncio.Event()
        self.orphaned = False
        """Set when the supervisor is gone: the process stops at once, since no client waits for a
        drain."""

    def announce(self, *children: int, **addresses: str) -> None:
        """Reports that the stage is ready, with its addresses and the ids of its child processes,
        to the log and to a supervisor that asked for it. Objects that exist by then are excluded
        from garbage collection."""
        collector.leave_out_what_exists()
        structlog.get_logger().info("ready", stage=self.stage, **addresses)
        if READY_FD in os.environ:
            fd = int(os.environ.pop(READY_FD))
            line = {
                "stage": self.stage,
                "addresses": addresses,
                "pid": os.getpid(),
                "children": children,
            }
            os.write(fd, json.dumps(line).encode() + b"\n")
            os.close(fd)


@contextlib.asynccontextmanager
async def lifetime(stage: str) -> AsyncIterator[Lifetime]:
    """Scope of a stage's life: inside, signals and the supervisor's pipe set `stopping`."""
    life = Lifetime(stage)
    loop = asyncio.get_running_loop()
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


def configure_logging(stage: str, level: str = "info") -> None:
    """Configures JSON lines on standard error, each with the stage's name. Raises `SettingError`
    for an unknown level."""
    check_log_level(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, BestEffortFile(sys.stderr))),
    )
    structlog.contextvars.bind_contextvars(stage=stage)
    structlog.get_logger().info("starting", version=RELEASE, commit=commit())


@contextlib.contextmanager
def in_one_line(stage: str, *faults: type[Exception]) -> Iterator[None]:
    """Ends the process with status 1 and a sentence for faults that a person can mend; others show
    their trace."""
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
