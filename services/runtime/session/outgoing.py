"""Frames that one end of a session sends. They are built one by one when there is something to
send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

SentT = TypeVar("SentT")


class Outgoing(Generic[SentT]):
    """Outgoing frames. `next_frame` makes the next frame of everything that waits, or returns None
    when nothing waits.

    On a slow connection frames become fuller, not more.
    """

    def __init__(self, next_frame: Callable[[], SentT | None]) -> None:
        self._next_frame = next_frame
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        """Pending while nothing waits to be sent. NOTE: a future, since an event costs a frame
        three times as much."""
        self._is_closed = False

    def wake(self) -> None:
        """Notes that a frame waits to be sent."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Ends `frames` after the waiting ones."""
        self._is_closed = True
        self.wake()

    async def frames(self) -> AsyncIterator[SentT]:
        """Yields frames until `close`."""
        while True:
            # Cleared first, so that a frame that is added during the send wakes the loop again.
            self._has_news = False
            while (frame := self._next_frame()) is not None:
                yield frame
            if self._is_closed:
                return
            if not self._has_news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
