"""The server's end of the core: starts the process, sends commands, hears reports, learns of its
death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from types import UnionType
from typing import assert_never

import msgspec
import structlog

from headwater.engine_core.step_output import EngineLoad
from headwater.engine_core.system.ring import PeerGone

from ...runtime.forked import Process
from ...runtime.settings import to_argv
from ...runtime.tasks import owned_task
from ..settings import EngineSettings
from . import launch
from .command_queue import CommandQueue
from .environment import core_environment
from .figures import CoreFigures
from .memory import CoreMemory
from .messages import (
    Command,
    Failed,
    Idle,
    OfFigures,
    OfOthers,
    Prepared,
    Progress,
    Ready,
    Report,
    Step,
    Waiting,
    decode_report,
    encode,
)
from .watch import CoreWatch

EXIT_SECONDS = 1.0
"""Time that the core has to end by itself."""

MAX_JITTER = 1.5
"""Factor on the silence that is allowed."""


class CoreFailed(Exception):
    """The core did not start, or has ended by itself."""


class CoreClient:
    """Commands are sent in order and never wait: see `CommandQueue`."""

    def __init__(self, hang_limit: float = 0.0) -> None:
        self._watch = CoreWatch(hang_limit)
        self.memory = CoreMemory()
        self._reports = self.memory.reports
        self._commands = CommandQueue(self.memory.commands, self._watch.commanded)
        self._start_result: Ready | CoreFailed | None = None
        self._on_report: Callable[[Step | Idle | Waiting], None] | None = None
        self._early_steps: list[Step] = []
        """Steps before `connect`: blocks that were found on a disk."""
        self._on_end: Callable[[], None] | None = None
        self._takes: dict[type, Callable[..., None]] = {}
        """Receivers of reports by their type: of adapters, of weights, and for other engines."""
        self._process: Process | None = None
        self._stand_by: Callable[[str], None] = lambda numerics_id: None
        """Has the next core's process forked ahead, for the same numerics id."""
        self.settled = asyncio.Event()
        """`ready` has an answer."""
        self.gone = asyncio.Event()
        """The core has ended by itself."""
        self.figures = CoreFigures()
        """Figures of each rank of the core; empty where it has none."""
        self.load = EngineLoad()
        """Load that the core reported last. Kept before `connect` too: a core that has just started
        is idle, and reports nothing more until it gets a request."""
        self.is_prepared = False
        """Whether everything that is compiled or captured once is complete, so that no step waits
        for it."""

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, settings: EngineSettings) -> AsyncIterator[CoreClient]:
        """Starts a core for the time of the `with` block."""
        # Drawn at random: engines that stall by one cause are not all killed at once, and the first
        # kill may end the stall.
        link = cls(settings.hang_limit * random.uniform(1, MAX_JITTER))
        lifeline, held = os.pipe()
        try:
            await link._start(settings, lifeline)
            async with owned_task(link._kill_when_hung()):
                yield link
        finally:
            await link._stop()
            os.close(held)

    async def ready(self) -> Ready:
        """Waits until the core serves, and returns its model and sizes. Raises `CoreFailed`."""
        await self.settled.wait()
        if not isinstance(self._start_result, Ready):
            assert self._start_result is not None
            raise self._start_result
        return self._start_result

    def connect(
        self, on_report: Callable[[Step | Idle | Waiting], None], on_end: Callable[[], None]
    ) -> None:
        """Passes every step to `on_report`, on the event loop, those so far at once; calls `on_end`
        when the core dies."""
        self._on_report = on_report
        self._on_end = on_end
        early = self._early_steps
        self._early_steps = []
        for step in early:
            on_report(step)

    def pass_on(self, kinds: UnionType, on_report: Callable[..., None]) -> None:
        """Passes the core's reports of these kinds, of `OfOthers`, to `on_report`, on the event
        loop."""
        self._takes |= dict.fromkeys(kinds.__args__, on_report)

    def send(self, command: Command) -> None:
        """Sends a command; callable from any thread. After the end nothing is sent."""
        self._watch.sent(command)
        self._commands.send(encode(command))

    @property
    def is_congested(self) -> bool:
        return self._commands.is_congested

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        """The exit status of the core, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def _start(self, settings: EngineSettings, lifeline: int) -> None:
        ends = self.memory.ends(lifeline)
        environment = core_environment(settings.threads)
        if not settings.takes_turns:
            # It would take memory that models which wake count on.
            self._stand_by = lambda numerics_id: launch.stand_by(environment, numerics_id)
        # NOTE: this comes before the stage's gRPC server starts: a child that uvloop forks beside
        # gRPC's threads may die before it executes its program.
        self._process = await launch.start_core(
            [msgspec.json.encode(ends).decode(), *to_argv(settings)],
            environment=environment,
            descriptors=ends.descriptors,
        )
        self.memory.close_inherited(ends)
        asyncio.get_running_loop().add_reader(self._reports.fileno(), self._on_reports)

    @property
    def may_be_in_step(self) -> bool:
        """See `CoreWatch`."""
        return self._watch.may_be_in_step

    async def _kill_when_hung(self) -> None:
        """Kills a hung core. The rest is as after any other death of a core."""
        await self._watch.until_hung()
        assert self._process is not None
        structlog.get_logger().error(
            "the engine core hangs", pid=self.pid, silent_seconds=self._watch.silence
        )
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _stop(self) -> None:
        with self._commands.lock:
            # Either end of file ends the core.
            self._commands.end()
            asyncio.get_running_loop().remove_reader(self._reports.fileno())
            self._reports.close()
        self.memory.close()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            # A core that ends just now may be reaped already, while its exit status is still on the
            # way.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _on_reports(self) -> None:
        try:
            messages = self._reports.read()
        except PeerGone:
            asyncio.get_running_loop().remove_reader(self._reports.fileno())
            self._settle(CoreFailed("the engine core ended before it was ready"))
            self.gone.set()
            if self._on_end is not None:
                self._on_end()
            return
        for message in messages:
            try:
                self._take(decode_report(message))
            except Exception as fault:
                # Later reports hold tokens and ends of other requests, and no report is repeated.
                structlog.get_logger().error("a report of the engine core failed", exc_info=fault)

    def _note_load(self, load: EngineLoad | None) -> None:
        if load is not None:
            self.load = load
            self._watch.note_load(load)

    def _take(self, report: Report) -> None:
        if isinstance(report, OfOthers):
            if (take := self._takes.get(type(report))) is not None:
                take(report)
            return
        if isinstance(report, OfFigures):
            self.figures.note(report)
            return
        match report:
            case Step() | Idle() | Waiting():
                with self._commands.lock:
                    num_sent = self._commands.num_sent
                    is_idle = isinstance(report, Idle) and report.num_commands == num_sent
                    self._watch.on_message(
                        is_idle=is_idle,
                        step_seconds=report.seconds if isinstance(report, Step) else 0.0,
                    )
                self._note_load(report.load)
                if self._on_report is not None:
                    self._on_report(report)
                elif isinstance(report, Step):
                    self._early_steps.append(report)
            case Progress():
                self._watch.on_message(is_idle=False)
                facts = {
                    "phase": report.phase,
                    "done": report.done,
                    "total": report.total,
                    "at": report.at,
                }
                structlog.get_logger().info("loading", **facts)
            case Ready():
                self._watch.started(report.longest_step)
                self._watch.on_message(is_idle=False)
                self.load = report.load
                self._settle(report)
            case Prepared():
                self.is_prepared = True
                if isinstance(self._start_result, Ready):
                    self._stand_by(self._start_result.numerics_id)
                structlog.get_logger().info("prepared")
            case Failed():
                self._settle(CoreFailed(report.reason))
            case _:
                assert_never(report)

    def _settle(self, start: Ready | CoreFailed) -> None:
        self._start_result = self._start_result or start
        self.settled.set()
