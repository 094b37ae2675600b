"""Reads the prefix index in Redis for a waiting request: a few MGETs within one small time
limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ..runtime.served_model import ServedModel
from ..runtime.store import READ_SECONDS, Store, StoreUnavailable
from .slots import Slot, SlotTable, block_prefix, shard_of

_FIRST_BLOCKS = 32
_SLOTS_SECONDS = 1.0
"""Seconds for which the live slots are cached; shorter than a lease."""

Incarnation = tuple[str, int]
"""Replica id and epoch."""


class IndexReader:
    def __init__(
        self,
        store: Store,
        *,
        seconds: float = READ_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` is the time limit of one look-up."""
        self._clock = clock
        self._store = store
        self._seconds = seconds
        self._slots: dict[tuple[str, int], tuple[float, dict[int, Incarnation]]] = {}

    async def matched(self, model: ServedModel, hashes: Sequence[bytes]) -> dict[Incarnation, int]:
        """Number of the chain's blocks by incarnation that holds the start of it. Raises
        `StoreUnavailable`."""
        if not hashes:
            return {}
        deadline = self._clock() + self._seconds
        shard = shard_of(hashes[0], model.num_shards)
        live = await self._live_slots(model.key, shard, deadline)
        width = max(live, default=0) // 8 + 1
        prefix = block_prefix(model.key, shard)
        holders = _bits(live, width)
        matched = dict[Incarnation, int]()
        start = 0
        num_blocks = _FIRST_BLOCKS
        while holders and start < len(hashes):
            keys = [prefix + block for block in hashes[start : start + num_blocks]]
            bitmaps = await self._store.command("MGET", *keys, seconds=self._left(deadline))
            for length, bitmap in enumerate(bitmaps, start):
                still = holders & int.from_bytes((bitmap or b"")[:width].ljust(width, b"\0"), "big")
                if still != holders:
                    matched |= {
                        live[slot]: length
                        for slot in live
                        if length and (holders & ~still) & _bits([slot], width)
                    }
                    holders = still
            # Most prompts share either little or nearly everything: look at twice as much each
            # time.
            start = start + num_blocks
            num_blocks = 2 * num_blocks
        return matched | {
            live[slot]: len(hashes) for slot in live if holders & _bits([slot], width)
        }

    async def _live_slots(
        self, model_key: str, shard: int, deadline: float
    ) -> dict[int, Incarnation]:
        until, live = self._slots.get((model_key, shard), (0.0, {}))
        if self._clock() >= until:
            slots: list[Slot] = await SlotTable(self._store, model_key, shard).read(
                seconds=self._left(deadline)
            )
            live = {slot.number: (slot.replica_id, slot.epoch) for slot in slots if slot.is_live}
            self._slots[model_key, shard] = self._clock() + _SLOTS_SECONDS, live
        return live

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise StoreUnavailable("the time for reading is over")
        return left


def _bits(slots: Iterable[int], width: int) -> int:
    """Slots as Redis writes them in a bitmap of `width` bytes: slot 0 is the highest bit."""
    return sum(1 << (8 * width - 1 - slot) for slot in slots)
