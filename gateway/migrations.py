"""What keeps one fault from becoming many: how often requests may move on suspicion, and who moves alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

SHARE = 0.1
"""Of all dispatches: migrations that nobody's death calls for."""
BURST = 10.0
"""So many of them at once."""


class Migrations:
    """One gateway's."""

    def __init__(self) -> None:
        self._left = BURST
        self._rooms: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def dispatched(self) -> None:
        """A request left for a replica."""
        self._left = min(BURST, self._left + SHARE)

    def is_excused(self) -> bool:
        """Whether one more may move on suspicion; counts it."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def alone(self, model_key: str) -> Callable[[], None]:
        """Returns when no other suspect of an engine's death is being tried; what is returned ends the trial."""
        room = self._rooms[model_key]
        await room.acquire()
        return room.release
