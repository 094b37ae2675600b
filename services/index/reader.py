"""Reads the prefix index in Redis for a waiting request: a few MGETs within one small time
limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..runtime.served_model import ServedModel
from ..runtime.store import READ_SECONDS, Store, StoreUnavailable
from .continuation import ALL_BLOCKS, last_continued, name_of
from .slots import Slot, SlotTable, block_prefix, shard_of

_FIRST_BLOCKS = 32
_SLOTS_SECONDS = 1.0
"""Seconds for which the live slots are cached; shorter than a lease."""

Incarnation = tuple[str, int]
"""Replica id and epoch."""


class _Chain(NamedTuple):
    """A chain that is looked up in one shard."""

    prefix: bytes
    """Prefix of its keys."""
    hashes: Sequence[bytes]
    width: int
    """Bytes of a bitmap that live slots take."""
    deadline: float


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
        """Number of the chain's leading blocks that each incarnation can continue. Raises
        `StoreUnavailable`."""
        if not hashes:
            return {}
        deadline = self._clock() + self._seconds
        shard = shard_of(hashes[0], model.num_shards)
        live = await self._live_slots(model.key, shard, deadline)
        width = max(live, default=0) // 8 + 1
        chain = _Chain(block_prefix(model.key, shard), hashes, width, deadline)
        if (model.blocks_seen or (ALL_BLOCKS,))[0] == ALL_BLOCKS:
            found = await self._leading(chain, live)
        else:
            found = dict.fromkeys(live, len(hashes))
        if model.blocks_seen:
            found = await self._continued(chain, model.blocks_seen, found)
        return {live[slot]: length for slot, length in found.items()}

    async def _leading(self, chain: _Chain, live: Iterable[int]) -> dict[int, int]:
        """Number of the chain's leading blocks by slot that holds the first of them."""
        width = chain.width
        holders = _bits(live, width)
        found = dict[int, int]()
        start = 0
        num_blocks = _FIRST_BLOCKS
        while holders and start < len(chain.hashes):
            bitmaps = await self._bitmaps(chain, 0, start, start + num_blocks)
            for length, bitmap in enumerate(bitmaps, start):
                still = holders & bitmap
                if still != holders:
                    lost = holders & ~still
                    found |= {slot: length for slot in live if length and lost & _bit(slot, width)}
                    holders = still
            # Most prompts share either little or nearly everything: look at twice as much each
            # time.
            start = start + num_blocks
            num_blocks = 2 * num_blocks
        return found | {slot: len(chain.hashes) for slot in live if holders & _bit(slot, width)}

    async def _continued(
        self, chain: _Chain, blocks_seen: Sequence[int], leading: Mapping[int, int]
    ) -> dict[int, int]:
        """Number of the chain's leading blocks that slots can continue, at most those in `leading`.
        Marks are read from the last of these blocks on."""
        kinds = [kind for kind, num_seen in enumerate(blocks_seen) if num_seen != ALL_BLOCKS]
        found = dict[int, int]()
        left = dict(leading)
        bitmaps: dict[int, list[int]] = {kind: [] for kind in kinds}
        start = max(leading.values(), default=0)
        num_blocks = max(_FIRST_BLOCKS, *blocks_seen)
        while left and start:
            first = max(0, start - num_blocks)
            for kind in kinds:
                bitmaps[kind] = await self._bitmaps(chain, kind, first, start) + bitmaps[kind]
            start = first
            num_blocks = 2 * num_blocks
            for slot, end in list(left.items()):
                bit = _bit(slot, chain.width)

                def has(kind: int, idx: int, first: int = first, bit: int = bit) -> bool:
                    return bool(bitmaps[kind][idx - first] & bit)

                if end > first and (length := last_continued(blocks_seen, has, first, end)):
                    found[slot] = length
                    del left[slot]
        return found

    async def _bitmaps(self, chain: _Chain, kind: int, start: int, end: int) -> list[int]:
        """Slots that hold the pages of a kind of blocks start … end − 1."""
        keys = [chain.prefix + name_of(kind, block) for block in chain.hashes[start:end]]
        found = await self._store.command("MGET", *keys, seconds=self._left(chain.deadline))
        width = chain.width
        return [
            int.from_bytes((bitmap or b"")[:width].ljust(width, b"\0"), "big") for bitmap in found
        ]

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
    return sum(_bit(slot, width) for slot in slots)


def _bit(slot: int, width: int) -> int:
    return 1 << (8 * width - 1 - slot)
