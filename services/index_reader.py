"""Reads the prefix index in Redis for a request that waits meanwhile: a few MGETs within one small time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headwater.services.served_model import ServedModel
from headwater.services.slots import Slot, SlotTable, block_prefix, shard_of
from headwater.services.store import READ_SECONDS, Store, StoreUnavailable

_FIRST_BLOCKS = 32
_SLOTS_SECONDS = 1.0
"""How long the live slots are remembered; shorter than a lease."""

Incarnation = tuple[str, int]
"""Replica id and epoch."""


class IndexReader:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._slots: dict[tuple[str, int], tuple[float, dict[int, Incarnation]]] = {}

    async def matched(self, model: ServedModel, hashes: Sequence[bytes]) -> dict[Incarnation, int]:
        """For each incarnation that holds the start of the chain: how many of its blocks. Raises `StoreUnavailable`."""
        if self._store.broken or not hashes:
            return {}
        deadline = time.monotonic() + READ_SECONDS
        shard = shard_of(hashes[0], model.num_shards)
        live = await self._live_slots(model.key, shard, deadline)
        lengths, prefix = dict.fromkeys(live, 0), block_prefix(model.key, shard)
        holders, start, num_blocks = set(live), 0, _FIRST_BLOCKS
        while holders and start < len(hashes):
            keys = [prefix + block for block in hashes[start : start + num_blocks]]
            for bitmap in await self._store.command("MGET", *keys, seconds=_left(deadline)):
                holders = {slot for slot in holders if _has_bit(bitmap or b"", slot)}
                for slot in holders:
                    lengths[slot] += 1
            # Most prompts share either little or nearly everything: look at twice as much each time.
            start, num_blocks = start + num_blocks, 2 * num_blocks
        return {live[slot]: length for slot, length in lengths.items() if length}

    async def _live_slots(self, model_key: str, shard: int, deadline: float) -> dict[int, Incarnation]:
        until, live = self._slots.get((model_key, shard), (0.0, {}))
        if time.monotonic() >= until:
            slots: list[Slot] = await SlotTable(self._store, model_key, shard).read(seconds=_left(deadline))
            live = {slot.number: (slot.replica_id, slot.epoch) for slot in slots if slot.is_live}
            self._slots[model_key, shard] = time.monotonic() + _SLOTS_SECONDS, live
        return live


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreUnavailable("the time for reading is over")
    return left


def _has_bit(bitmap: bytes, slot: int) -> bool:
    return slot < 8 * len(bitmap) and bool(bitmap[slot >> 3] & (128 >> (slot & 7)))
