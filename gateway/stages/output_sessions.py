"""The output processors within reach, and the choice of one for a request. Knows nothing about
frames."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import blake2b

from headwater.services.runtime import errors
from headwater.services.runtime.gateway_identity import Gateway
from headwater.services.runtime.tasks import end, log_failure

from .output_session import OutputSession

ANY_MODEL = ""


class OutputSessions:
    """The sessions to all output processors; each engine's requests go through one of them."""

    def __init__(self, gateway_id: str = "") -> None:
        self._gateway = Gateway(gateway_id, secrets.token_hex(8))
        self.on_change: Callable[[], None] = lambda: None
        """Called when a session is connected."""
        self._sessions: dict[str, OutputSession] = {}
        self._tasks: dict[OutputSession, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def join(self, address: str, model: str = ANY_MODEL) -> None:
        """Adds an output processor for a model; one that serves several models joins several
        times."""
        if address not in self._sessions and (left := self._left_at(address)) is not None:
            # The output processor did not end it, and would not end it later.
            self._sessions[address] = left
            left.leaving = False
        elif address not in self._sessions:
            session = self._sessions[address] = OutputSession(address, self._stands, self._gateway)
            task = self._tasks[session] = asyncio.create_task(session.run())
            task.add_done_callback(log_failure)
            task.add_done_callback(lambda _: self._tasks.pop(session, None))
        self._sessions[address].models.add(model)

    def leave(self, address: str, model: str = ANY_MODEL) -> None:
        """Takes a model away from an output processor. Without models it gets no new streams; its
        running streams end by themselves, or with the connection."""
        if (session := self._sessions.get(address)) is not None:
            session.models.discard(model)
            if session.models:
                return
            del self._sessions[address]
            session.leaving = True
            if not session.num_streams and (task := self._tasks.get(session)) is not None:
                task.cancel()

    def _left_at(self, address: str) -> OutputSession | None:
        """Session with an output processor that left while streams ran there; it counts as briefly
        out of reach."""
        going_on = (
            each for each, task in self._tasks.items() if not (task.done() or task.cancelling())
        )
        return next((each for each in going_on if each.leaving and each.address == address), None)

    def pick(self, engine: str, model: str = ANY_MODEL) -> OutputSession:
        """Picks an output processor with the model by rendezvous hash, so that an engine talks to
        one of them.

        Raises `Unavailable` when there is none.
        """
        connected = self._with(model) or self._with(ANY_MODEL)
        if not connected:
            raise errors.Unavailable(
                "no output processor is within reach", code="output_processor_unavailable"
            )
        if len(connected) == 1:
            return connected[0]
        return max(connected, key=lambda session: _weight(session.address, engine))

    async def wait_for(self, model: str) -> None:
        """Returns when an output processor with the model is within reach."""
        while not self.serves(model):
            self._news.clear()
            await self._news.wait()

    def _stands(self) -> None:
        self._news.set()
        self.on_change()

    def serves(self, model: str) -> bool:
        return bool(self._with(model) or self._with(ANY_MODEL))

    def _with(self, model: str) -> list[OutputSession]:
        return [
            each for each in self._sessions.values() if each.takes_streams and model in each.models
        ]

    def in_order_for(self, request_id: str) -> list[OutputSession]:
        """Output processors within reach, in the order in which they would be picked for a
        resumable request."""
        connected = [session for session in self._sessions.values() if session.connected.is_set()]
        return sorted(
            connected, key=lambda session: _weight(session.address, request_id), reverse=True
        )

    def at(self, address: str) -> OutputSession:
        """Session with the output processor at an address. Raises `Unavailable`."""
        if (session := self._sessions.get(address)) is None:
            raise errors.Unavailable(
                "the output processor is out of reach", code="output_processor_unavailable"
            )
        return session

    @property
    def is_whole(self) -> bool:
        """Whether all known output processors can be reached, so that a stream which none of them
        has does not exist."""
        return bool(self._sessions) and all(
            session.connected.is_set() for session in self._sessions.values()
        )

    @property
    def is_reachable(self) -> bool:
        return any(session.connected.is_set() for session in self._sessions.values())

    @property
    def num_streams(self) -> int:
        return sum(session.num_streams for session in self._tasks)

    async def close(self) -> None:
        await end(*self._tasks.values())


def _weight(address: str, engine: str) -> bytes:
    return blake2b(f"{address}|{engine}".encode(), digest_size=8).digest()
