"""The called end of a session: reads frames as they come, and sends waiting ones.

Reading never waits for writing. Knows nothing about the contents of frames.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, TypeVar

from ..tasks import owned_task
from .outgoing import Outgoing

SentT = TypeVar("SentT")
HeardT = TypeVar("HeardT")


class AnsweringEnd(Generic[SentT, HeardT]):
    """The called end. `next_frame` as in `Outgoing`; `on_frame` takes each frame in order.

    `on_left` is called when no more frames come: with True when the caller ended them or was
    cancelled, with False when reading them failed.
    """

    def __init__(
        self,
        next_frame: Callable[[], SentT | None],
        on_frame: Callable[[HeardT], None],
        on_left: Callable[[bool], None],
    ) -> None:
        self._outgoing = Outgoing(next_frame)
        self._on_frame = on_frame
        self._on_left = on_left

    def wake(self) -> None:
        """Notes that a frame waits to be sent."""
        self._outgoing.wake()

    def close(self) -> None:
        """Ends the session after the waiting frames."""
        self._outgoing.close()

    async def run(self, incoming: AsyncIterator[HeardT]) -> AsyncGenerator[SentT, None]:
        """Frames for the caller until `close`. Raises the error of reading."""
        async with owned_task(self._read(incoming)) as reading:
            async for frame in self._outgoing.frames():
                yield frame
            if reading.done():
                reading.result()

    async def _read(self, incoming: AsyncIterator[HeardT]) -> None:
        is_clean = False
        try:
            async for frame in incoming:
                self._on_frame(frame)
            is_clean = True
        finally:
            self._on_left(is_clean)
