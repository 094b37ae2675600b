"""A request's body as it arrives, within limits of bytes and of time."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from headwater.services.runtime import errors

from ..settings import BODY_BYTES_PER_SECOND
from ..wire.body_stream import Message, Receive, rest_of


class Receiving(Protocol):
    """The request that the body belongs to."""

    receive: Receive
    slow_body_limit: float
    client_left: bool
    reply_headers: list[tuple[bytes, bytes]]

    def within(self, limit: int, size: int) -> int:
        """Returns the size. Raises `BodyTooLarge`."""


class IncomingBody:
    """A request's body as it comes over the wire, encoded or not, a piece at a time."""

    def __init__(self, exchange: Receiving, limit: int) -> None:
        self.is_whole = False
        self._exchange = exchange
        self._limit = limit
        self._size = 0
        self._waited = 0.0
        """Seconds of waiting. The time that the reader takes for a piece does not count."""

    async def piece(self) -> bytes:
        """The next piece. Raises as `Exchange.chunks` does."""
        exchange = self._exchange
        patience = exchange.slow_body_limit
        asked_at = time.monotonic()
        seconds = patience + self._size / BODY_BYTES_PER_SECOND
        left = seconds - self._waited
        # A silence is bounded by itself: behind a large file that came fast, hours may be left.
        is_silent = left > patience
        try:
            message = await self._next_message(patience if is_silent else left)
        except TimeoutError:
            exchange.reply_headers.append((b"connection", b"close"))
            raise errors.SlowBody(
                self._size, patience if is_silent else seconds, is_silent
            ) from None
        self._waited += time.monotonic() - asked_at
        if message["type"] == "http.disconnect":
            exchange.client_left = True
            raise errors.ClientGone("the client left before its request was whole")
        chunk: bytes = message.get("body", b"")
        self._size = exchange.within(self._limit, self._size + len(chunk))
        self.is_whole = not message.get("more_body", False)
        return chunk

    async def _next_message(self, seconds: float) -> Message:
        """The server's next message. Raises `TimeoutError`. A message that is here already, as the
        body of a short request, costs no timer."""
        receiving: Any = self._exchange.receive()
        try:
            waits_for = receiving.send(None)
        except StopIteration as done:
            message: Message = done.value
            return message
        async with asyncio.timeout(seconds):
            return await rest_of(receiving, waits_for)
