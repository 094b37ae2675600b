"""The sessions of an engine: each gets what a step says of its streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import structlog

from headwater.engine_core.step_output import StepOutput

from ...runtime.errors import Unavailable
from .session import EngineSession
from .session_host import Host


class EngineSessions:
    def __init__(self) -> None:
        self._sessions: set[EngineSession] = set()
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def session(self, host: Host) -> Iterator[EngineSession]:
        """A session inside the `with` block; leaving it cancels its streams."""
        session = EngineSession(host)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.abandon()

    def note_changed(self) -> None:
        """Notes that streams of a session have ended."""
        self._changed.set()

    @property
    def num_streams(self) -> int:
        return sum(session.num_streams for session in self._sessions)

    def deliver(self, output: StepOutput) -> None:
        for session in list(self._sessions):
            try:
                session.deliver(output)
            except Exception as fault:
                # Streams of this session lack this step's output; streams of other sessions
                # continue.
                structlog.get_logger().error("a step was not delivered", exc_info=fault)
                session.end(
                    Unavailable(
                        "the engine could not send what it computed", code="step_not_delivered"
                    )
                )

    def cancel_starved(self, now: float) -> None:
        """Cancels streams whose readers have been out of room for too long."""
        for session in self._sessions:
            session.cancel_starved(now)

    def hand_over(self, most_tokens: float) -> int:
        """Hands over streams that may take more than so many tokens. Returns how many."""
        return sum(session.hand_over(most_tokens) for session in self._sessions)

    async def await_idle(self, seconds: float) -> None:
        """Returns when no stream is left, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(session.is_idle for session in self._sessions):
                    self._changed.clear()
                    await self._changed.wait()

    def end(self, fault: Unavailable | None = None) -> None:
        """Ends every session; see `EngineSession.end`."""
        for session in list(self._sessions):
            session.end(fault)
