"""Bounds how often requests migrate on suspicion and runs suspects one at a time, so that one fault
does not become many."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable

from headwater.services.runtime.bus import Bus

from ..router.replica import Incarnation
from .doubts import Doubts

SHARE = 0.1
"""Share of all dispatches that may be migrations without the death of a stage."""
BURST = 10.0
"""Number of such migrations that may come at once."""
MAX_ENGINES = 1024
"""Most engines that are remembered, dead ones included."""


class Migrations:
    """Migrations of one gateway. `doubts` are those of all."""

    def __init__(self, doubts: Doubts | None = None) -> None:
        self.doubts = doubts or Doubts(Bus(None))
        self._left = BURST
        self._rooms: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._num_doubted: OrderedDict[Incarnation, int] = OrderedDict()

    def dispatched(self) -> None:
        """Counts a request that was dispatched to a replica."""
        self._left = min(BURST, self._left + SHARE)

    def is_excused(self) -> bool:
        """Whether one more request may migrate on suspicion. Counts it."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def alone(self, model_key: str) -> Callable[[], None]:
        """Waits until no other suspect of an engine's death is being tried, here or by another
        gateway; returns the function that ends the trial."""
        room = self._rooms[model_key]
        await room.acquire()
        try:
            await self.doubts.until_alone(model_key)
        except BaseException:
            room.release()
            raise
        return room.release

    def doubt(self, model_key: str, engine: Incarnation) -> None:
        """Notes that a doubted answer runs on an engine: it was on another engine when that died,
        and has not got any further since."""
        self.doubts.begin(model_key, engine)
        self._num_doubted[engine] = self.num_doubted(engine) + 1
        self._num_doubted.move_to_end(engine)
        if len(self._num_doubted) > MAX_ENGINES:
            self._num_doubted.popitem(last=False)

    def died(self, model_key: str, engine: Incarnation) -> None:
        """Notes that an engine died with a doubted answer, which stays counted there."""
        self.doubts.end(model_key, engine, has_died=True)

    def trust(self, model_key: str, engine: Incarnation) -> None:
        """Notes that a doubted answer got further there, or left while the engine lived."""
        self.doubts.end(model_key, engine, has_died=False)
        if engine in self._num_doubted:
            self._num_doubted[engine] -= 1

    def num_doubted(self, engine: Incarnation) -> int:
        """Number of doubted answers of this gateway that ran on an engine when it died."""
        return self._num_doubted.get(engine, 0)
