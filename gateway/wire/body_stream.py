"""A response's body in pieces over ASGI, without a task a piece. Knows nothing about what the
pieces are."""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, TypeVar

from headwater.services.runtime import errors

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
ResultT = TypeVar("ResultT")


class BodyStream:
    """Writes from anywhere in the loop while the socket takes it; `blocked` while it does not.

    A server's `send` finishes without waiting as long as the socket is writable, so it is driven on
    the spot. Only when it would wait does a task take it over, and `on_writable` is called when
    that is done.
    """

    def __init__(
        self,
        send: Send,
        headers: Callable[[], Headers],
        on_writable: Callable[[], None],
        patience: float,
    ) -> None:
        """`headers` is called when the response begins; `patience` is the number of seconds to wait
        for a client that reads nothing of an answer that has ended."""
        self._send = send
        self._headers = headers
        self._patience = patience
        self._on_writable = on_writable
        self._queue: deque[Message] = deque()
        self._resumer: asyncio.Task[None] | None = None
        self.started = False
        self.blocked = False
        self.num_events = 0

    def write(self, data: bytes) -> None:
        """Writes one event or several. While `blocked` they are kept: a caller with much to write
        checks `blocked` first."""
        self._begin()
        self.num_events += 1
        self._push({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self, data: bytes) -> None:
        """Writes the last events; returns when the server has them. Raises `SlowReader` for a
        client that reads nothing."""
        self._begin()
        self.num_events += 1
        await self.taken()
        # With the end of the body, in one write to the socket.
        self._push({"type": "http.response.body", "body": data, "more_body": False})
        await self.taken()

    async def taken(self) -> None:
        """Returns when the server has everything. Raises `SlowReader`."""
        if not self.blocked:
            return
        try:
            async with asyncio.timeout(self._patience):
                while self.blocked:
                    assert self._resumer is not None
                    # The stream continues when this wait ends: the client may still read what is
                    # left.
                    await asyncio.shield(self._resumer)
        except TimeoutError:
            raise errors.SlowReader(self._patience) from None

    async def abandon(self) -> None:
        """Drops everything that is not written: the client is gone, or the answer is given up."""
        self._queue.clear()
        # NOTE: the callback refers to the stream, and objects that the cycle collector need not
        # find cost less.
        self._on_writable = _ignore
        if self._resumer is not None:
            self._resumer.cancel()
            await asyncio.gather(self._resumer, return_exceptions=True)

    def _begin(self) -> None:
        if not self.started:
            self.started = True
            self._push(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": self._headers(),
                }
            )

    def _push(self, message: Message) -> None:
        if self.blocked:
            self._queue.append(message)
            return
        sending: Any = self._send(message)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self.blocked = True
        self._resumer = asyncio.get_running_loop().create_task(self._resume(sending, waits_for))

    async def _resume(self, sending: Coroutine[Any, Any, None], waits_for: object) -> None:
        await rest_of(sending, waits_for)
        while self._queue:
            await self._send(self._queue.popleft())
        self.blocked = False
        self._on_writable()


def _ignore() -> None:
    """Does nothing when there is room in the stream again."""


@types.coroutine
def rest_of(
    coroutine: Coroutine[Any, Any, ResultT], waits_for: object
) -> Generator[object, None, ResultT]:
    """Finishes in a task a coroutine that was begun by `send` and waits for `waits_for`."""
    try:
        while True:
            yield waits_for
            waits_for = coroutine.send(None)
    except StopIteration as done:
        result: ResultT = done.value
        return result
    finally:
        coroutine.close()
