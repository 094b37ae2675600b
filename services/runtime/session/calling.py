"""The calling end of a session: checks the proof of the other end, passes frames both ways, and
reports the cause of the end.

Reading never waits for writing. Knows nothing about the contents of frames.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog

from ..call_proof import Impostor
from ..tasks import end
from .outgoing import Outgoing
from .silence import Silence

RECONNECT_SECONDS = 0.2
SentT = TypeVar("SentT")
HeardT = TypeVar("HeardT")


class Channel(Protocol):
    """The way to the other end: between processes a `StageChannel`."""

    async def proven(self, call: Any, /) -> None:
        """Returns when the other end of a call has proven that it belongs to the cluster. Raises
        `Impostor`."""


class Cause(Enum):
    """Cause of a session's end."""

    ENDED = auto()
    """The other end has ended it."""
    BROKEN = auto()
    """The call failed: the connection, or the process at its other end."""
    UNSERVED = auto()
    """The other end has no such method."""
    STRANGER = auto()
    """The other end does not prove that it belongs to the cluster."""
    UNREADABLE = auto()
    """The other end sent a frame that contradicts itself."""
    SILENT = auto()
    """The other end sends nothing, not even when it is probed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a session."""

    cause: Cause
    problem: str
    """The cause in words, for logs."""
    was_open: bool = True
    """Whether the other end had proven itself and was open."""


ENDED = Ending(Cause.ENDED, "it ended the session")
SILENT = Ending(Cause.SILENT, "it says nothing, not even when it is asked")


class CallingEnd(Generic[SentT, HeardT]):
    """One session after another with the same process: `next_frame` as in `Outgoing`; `on_frame`
    takes each frame in order and raises `ValueError` for one that contradicts itself."""

    def __init__(
        self,
        next_frame: Callable[[], SentT | None],
        on_frame: Callable[[HeardT], None],
        silence: Silence | None = None,
    ) -> None:
        self._outgoing = Outgoing(next_frame)
        self._on_frame = on_frame
        self._silence = silence

    def wake(self) -> None:
        """Notes that a frame waits to be sent. Without a session it waits for the next one, unless
        its owner drops it."""
        self._outgoing.wake()

    async def run(
        self,
        channel: Channel,
        call: Any,
        on_open: Callable[[], Awaitable[None]] | Callable[[], None],
    ) -> Ending:
        """Runs a session from its call to its end. `on_open` is called when the other end has
        proven itself, before the first frame; it may ask the other end more."""
        is_open = False
        try:
            await channel.proven(call)
            if (more := on_open()) is not None:
                await more
            is_open = True
            return await self._pass_frames(call)
        except grpc.aio.AioRpcError as failure:
            is_unserved = failure.code() is grpc.StatusCode.UNIMPLEMENTED
            cause = Cause.UNSERVED if is_unserved else Cause.BROKEN
            return Ending(cause, failure.details() or failure.code().name, is_open)
        except Impostor as stranger:
            return Ending(Cause.STRANGER, str(stranger), is_open)
        finally:
            call.cancel()

    async def _pass_frames(self, call: Any) -> Ending:
        reading = asyncio.create_task(self._read(call))
        tasks: list[asyncio.Task[Any]] = [reading, asyncio.create_task(self._write(call, reading))]
        if self._silence is not None:
            tasks.append(asyncio.create_task(self._silence.until_lost()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    # Raises what the task failed with.
                    task.result()
            return reading.result() if reading.done() else SILENT
        finally:
            await end(*tasks)

    async def _read(self, call: Any) -> Ending:
        while (frame := await call.read()) is not grpc.aio.EOF:
            if self._silence is not None:
                self._silence.on_frame()
            try:
                self._on_frame(frame)
            except ValueError as failure:
                return Ending(Cause.UNREADABLE, f"it sent a frame that cannot be read: {failure}")
        return ENDED

    async def _write(self, call: Any, reading: asyncio.Task[Ending]) -> None:
        # A call that has ended refuses what is written; why it ended is the reader's to say.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for frame in self._outgoing.frames():
                await call.write(frame)
        await asyncio.wait([reading])


async def keep_up(
    run: Callable[[], Awaitable[Ending]],
    name: str,
    address: str,
    *,
    is_over: Callable[[Ending], bool],
) -> None:
    """Runs one session after another until `is_over` says that no more are needed. `name` is used
    in logs."""

    async def run_one() -> Ending:
        try:
            return await run()
        except Exception as fault:
            # An error of this process ends one session, not all later ones.
            structlog.get_logger().exception(f"{name} failed", address=address)
            return Ending(Cause.BROKEN, repr(fault))

    last_problem = ""
    while not is_over(ending := await run_one()):
        # Repeated failures of the same kind are logged once.
        is_news = ending.was_open or ending.problem != last_problem
        log = structlog.get_logger()
        last_problem = ending.problem
        (log.warning if is_news else log.debug)(
            f"{name} lost", address=address, problem=ending.problem
        )
        await asyncio.sleep(RECONNECT_SECONDS)
