"""The server's end of the core: starts the process, sends commands, hears reports, learns of its
death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import assert_never

import msgspec
import structlog

from headwater.engine_core.parallel.rank_facts import RankFigures
from headwater.engine_core.step_output import EngineLoad
from headwater.engine_core.system.ring import PeerGone, RingReader, RingWriter, create_ring

from ..runtime.forked import ForkClient, Process
from ..runtime.settings import to_argv
from ..runtime.tasks import owned_task
from .block_keys import offer_block_keys
from .core_environment import core_environment
from .core_variables import CORE_FORKS_FD
from .core_watch import CoreWatch
from .mask_table import Int32Array, create_mask_memory, map_masks
from .messages import (
    BlocksLent,
    Command,
    CopiedPull,
    EndPull,
    Ends,
    Failed,
    Idle,
    Prepared,
    Progress,
    PullBlocks,
    Ranks,
    Ready,
    Report,
    Step,
    ToPeers,
    Waiting,
    decode_report,
    encode,
)
from .peer_records import UInt8Array, create_record_memory, map_records
from .settings import EngineSettings

MAX_BACKLOG_BYTES = 16 << 20
"""Bytes of commands that wait for room in the ring; beyond them new requests are refused."""
EXIT_SECONDS = 1.0
"""Time that the core has to end by itself."""

CORE_MODULE = "headwater.services.engine.core_process"
STDOUT = 1
STDERR = 2
MAX_JITTER = 1.5
"""Factor on the silence that is allowed."""


class CoreFailed(Exception):
    """The core did not start, or has ended by itself."""


async def start_core(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> Process:
    """Starts the core, which inherits the descriptors: by the server of forks that the supervisor
    names, else in a new interpreter."""
    if (forks := ForkClient.inherited(CORE_FORKS_FD)) is not None:
        with forks.socket:
            files = {number: number for number in (STDOUT, STDERR, *descriptors)}
            forked = await forks.start(CORE_MODULE, arguments, environment=environment, files=files)
        if forked is not None:
            return forked
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        CORE_MODULE,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
        pass_fds=descriptors,
    )


class CoreClient:
    """Commands are sent in order and never wait: what the ring has no room for waits here."""

    def __init__(self, hang_limit: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = CoreWatch(hang_limit)
        command_writer, self._command_reader = create_ring()
        self._report_writer, report_reader = create_ring()
        self._mask_memory = create_mask_memory()
        self._record_memory = create_record_memory()
        self._mask_report_writer, mask_report_reader = create_ring()
        self._commands = RingWriter(command_writer)
        self._reports = RingReader(report_reader)
        self._mask_reports: RingReader | None = RingReader(mask_report_reader)
        self._start_result: Ready | CoreFailed | None = None
        self._on_report: Callable[[Step | Idle | Waiting], None] | None = None
        self._early_steps: list[Step] = []
        """Steps before `connect`: blocks that were found on a disk."""
        self._on_end: Callable[[], None] | None = None
        self._on_peer_report: Callable[[ToPeers], None] | None = None
        # Held by whoever sends, looks after what waits, compares what was sent, or ends it all.
        self._sending = threading.Lock()
        self._has_stopped = False
        self._num_commands = 0
        self._backlog: deque[tuple[bytes, int]] = deque()
        self._num_backlog_bytes = 0
        self._process: Process | None = None
        self.settled = asyncio.Event()
        """`ready` has an answer."""
        self.gone = asyncio.Event()
        """The core has ended by itself."""
        self.rank_figures: list[RankFigures] = []
        """Figures of each rank of the core; empty where it has none."""
        self.load = EngineLoad()
        """Load that the core reported last. Kept before `connect` too: a core that has just started
        is idle, and reports nothing more until it gets a request."""
        self.is_prepared = False
        """No step waits any more for what is compiled or captured once."""

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, settings: EngineSettings) -> AsyncIterator[CoreClient]:
        """A core for the length of a scope."""
        # Not the same for all: engines that stand still by one cause are not killed at once, and
        # the first may end it.
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
        """From now on `on_report` gets every step, on the event loop, and `on_end` is told when the
        core dies. Steps so far come at once."""
        self._on_report = on_report
        self._on_end = on_end
        early = self._early_steps
        self._early_steps = []
        for step in early:
            on_report(step)

    def connect_peers(self, on_report: Callable[[ToPeers], None]) -> None:
        """From now on `on_report` gets what the core has to say to other engines, on the event
        loop."""
        self._on_peer_report = on_report

    def send(self, command: Command) -> None:
        """From any thread; after the end nothing is sent."""
        message = encode(command)
        with self._sending, contextlib.suppress(PeerGone):
            if self._has_stopped:
                return
            self._num_commands += 1
            self._watch.commanded()
            for piece, flag in self._commands.pieces(message):
                if self._backlog or not self._commands.try_write(piece, flag):
                    self._wait_for_room(piece, flag)

    def map_masks(self, ready: Ready) -> Int32Array:
        """The table in which the core finds the masks of its rows, to be written."""
        return map_masks(
            self._mask_memory, ready.max_draft_tokens + 1, ready.num_rows, ready.vocab_size
        )

    def map_records(self, ready: Ready) -> UInt8Array:
        """Blocks on their way from and to other engines."""
        return map_records(self._record_memory, ready.num_peer_rows, ready.peer_row_bytes)

    def take_mask_reports(self) -> RingReader:
        """Once: where steps come that ask for masks or were drawn under them, also to be closed by
        whoever takes it."""
        assert self._mask_reports is not None
        taken = self._mask_reports
        self._mask_reports = None
        return taken

    @property
    def is_congested(self) -> bool:
        return self._num_backlog_bytes > MAX_BACKLOG_BYTES

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        """The exit status of the core, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def _start(self, settings: EngineSettings, lifeline: int) -> None:
        ends = Ends(
            commands=self._command_reader,
            reports=self._report_writer,
            mask_reports=self._mask_report_writer,
            masks=self._mask_memory,
            records=self._record_memory,
            block_keys=offer_block_keys(),
            lifeline=lifeline,
        )
        # NOTE: the server does not speak gRPC yet. Where it does, a child of uvloop may die before
        # it has begun.
        self._process = await start_core(
            [msgspec.json.encode(ends).decode(), *to_argv(settings)],
            environment=core_environment(settings.threads),
            descriptors=(
                *ends.commands,
                *ends.reports,
                *ends.mask_reports,
                ends.masks,
                ends.records,
                ends.block_keys,
                lifeline,
            ),
        )
        for end in (self._command_reader, self._report_writer, self._mask_report_writer):
            end.close()
        os.close(ends.block_keys)
        os.close(lifeline)
        asyncio.get_running_loop().add_reader(self._reports.fileno(), self._on_reports)

    @property
    def may_be_in_step(self) -> bool:
        """See `CoreWatch`."""
        return self._watch.may_be_in_step

    async def _kill_when_hung(self) -> None:
        """Its end is then what any other death of a core is."""
        await self._watch.until_hung()
        assert self._process is not None
        structlog.get_logger().error(
            "the engine core hangs", pid=self.pid, silent_seconds=self._watch.silence
        )
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        with self._sending:
            self._has_stopped = True
            loop.remove_reader(self._reports.fileno())
            loop.remove_reader(self._commands.fileno())
            # Either end of file ends the core.
            self._commands.close()
            self._reports.close()
        if self._mask_reports is not None:
            self._mask_reports.close()
        os.close(self._mask_memory)
        os.close(self._record_memory)
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
                # Reports behind it have tokens and ends of other requests, which nothing says
                # again.
                structlog.get_logger().error("a report of the engine core failed", exc_info=fault)

    def _take(self, report: Report) -> None:
        match report:
            case Step() | Idle() | Waiting():
                with self._sending:
                    is_idle = isinstance(report, Idle) and report.num_commands == self._num_commands
                    self._watch.heard(
                        is_idle=is_idle,
                        step_seconds=report.seconds if isinstance(report, Step) else 0.0,
                    )
                self.load = report.output.load if isinstance(report, Step) else report.load
                if self._on_report is not None:
                    self._on_report(report)
                elif isinstance(report, Step):
                    self._early_steps.append(report)
            case Progress():
                self._watch.heard(is_idle=False)
                facts = {
                    "phase": report.phase,
                    "done": report.done,
                    "total": report.total,
                    "at": report.at,
                }
                structlog.get_logger().info("loading", **facts)
            case Ready():
                self._watch.started(report.longest_step)
                self._watch.heard(is_idle=False)
                self.load = report.load
                self._settle(report)
            case Prepared():
                self.is_prepared = True
                structlog.get_logger().info("prepared")
            case Ranks():
                self.rank_figures = report.figures
            case PullBlocks() | EndPull() | CopiedPull() | BlocksLent():
                if self._on_peer_report is not None:
                    self._on_peer_report(report)
            case Failed():
                self._settle(CoreFailed(report.reason))
            case _:
                assert_never(report)

    def _settle(self, start: Ready | CoreFailed) -> None:
        self._start_result = self._start_result or start
        self.settled.set()

    def _wait_for_room(self, piece: bytes, flag: int) -> None:
        if not self._backlog:
            self._loop.call_soon_threadsafe(self._await_room)
        self._backlog.append((piece, flag))
        self._num_backlog_bytes += len(piece)

    def _await_room(self) -> None:
        if not self._has_stopped:
            asyncio.get_running_loop().add_reader(self._commands.fileno(), self._on_room)

    def _on_room(self) -> None:
        with self._sending:
            try:
                while self._backlog and self._commands.try_write(*self._backlog[0]):
                    self._num_backlog_bytes -= len(self._backlog.popleft()[0])
            except PeerGone:
                self._backlog.clear()
                self._num_backlog_bytes = 0
            if not self._backlog:
                asyncio.get_running_loop().remove_reader(self._commands.fileno())
