"""Frames that one end of a session sends: an end that has something to send makes them one by
one."""

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
        self._changed = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Notes that a frame waits to be sent."""
        self._changed.set()

    def close(self) -> None:
        """Ends `frames` after the waiting ones."""
        self._is_closed = True
        self._changed.set()

    async def frames(self) -> AsyncIterator[SentT]:
        """Yields frames until `close`."""
        while True:
            # Cleared first, so that a frame that is added during the send wakes the loop again.
            self._changed.clear()
            while (frame := self._next_frame()) is not None:
                yield frame
            if self._is_closed:
                return
            await self._changed.wait()
