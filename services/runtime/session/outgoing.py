"""What one end of a session has still to send: asked for frame by frame, whenever there is something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

SentT = TypeVar("SentT")


class Outgoing(Generic[SentT]):
    """`next_frame` makes the next frame of all that waits by then, or returns None when nothing waits.

    A slow connection so makes frames fuller, not more.
    """

    def __init__(self, next_frame: Callable[[], SentT | None]) -> None:
        self._next_frame = next_frame
        self._changed = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Something waits to be sent."""
        self._changed.set()

    def close(self) -> None:
        """Ends `frames` after what waits."""
        self._is_closed = True
        self._changed.set()

    async def frames(self) -> AsyncIterator[SentT]:
        """Frames as they come, until `close`."""
        while True:
            # Cleared first: what comes while a frame is on its way wakes again.
            self._changed.clear()
            while (frame := self._next_frame()) is not None:
                yield frame
            if self._is_closed:
                return
            await self._changed.wait()
