"""Context of one grant: reserves when it begins, and records the use when it ends."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from .grant import Grant
from .token_counts import TokenUse


class Charged:
    """NOTE: a class, since the context manager of a generator costs three times as much."""

    __slots__ = ("_began", "_end", "_grant", "_granted", "_use")

    def __init__(
        self,
        granted: Awaitable[Grant],
        end: Callable[[Grant, TokenUse, float, BaseException | None], Awaitable[None]],
        use: Callable[[], TokenUse],
    ) -> None:
        """`end` gets the grant, its use, the seconds that it was held, and what ended it."""
        self._granted = granted
        self._end = end
        self._use = use

    async def __aenter__(self) -> Grant:
        self._grant = await self._granted
        self._began = time.monotonic()
        return self._grant

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.monotonic() - self._began
        await self._end(self._grant, self._use(), seconds, raised)
