"""Hashes of the blocks that a disk holds, the order in which they are evicted, and those whose use
is to be noted in their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..block_record import BlockId
from ..value.tier_order import TierOrder

TOUCH_SECONDS = 60.0
"""Time between two notes in files of when their blocks were used. Most blocks are used often, on
the device."""


class HeldHashes:
    def __init__(self, clock: Callable[[], float], order: TierOrder) -> None:
        self.order = order
        """Also has blocks that are being written."""
        self._clock = clock
        self.namespace_of: dict[bytes, bytes] = {}
        """Keyed by hash."""
        self._used: dict[bytes, None] = {}
        """Hashes whose files have not been marked as used yet, in order of use."""
        self._touch_at = 0.0

    def __len__(self) -> int:
        return len(self.namespace_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.namespace_of

    def add_oldest(self, block: BlockId) -> None:
        """Adds a block of an earlier run."""
        self.namespace_of[block.block_hash] = block.namespace
        self.order.add_oldest(block.block_hash, block.parent)

    def lose(self, block_hash: bytes) -> bytes:
        """Forgets a hash; returns its namespace."""
        self.order.drop((block_hash,))
        return self.namespace_of.pop(block_hash)

    def lose_all(self) -> list[bytes]:
        """Forgets all hashes, and returns them."""
        lost = list(self.namespace_of)
        self.order.drop(lost)
        self.namespace_of.clear()
        return lost

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Notes that hashes were used, given from the first to the last of a sequence; some may not
        be held any more."""
        self.order.touch(hashes)
        for block_hash in reversed(hashes):
            if block_hash in self.namespace_of:
                self._used.pop(block_hash, None)
                self._used[block_hash] = None

    def take_used(self) -> dict[bytes, bytes]:
        """Namespaces by hash, of hashes whose use is to be noted in files now; empty: none."""
        if not self._used or self._clock() < self._touch_at:
            return {}
        held = self.namespace_of
        used = self._used
        self._used = {}
        self._touch_at = self._clock() + TOUCH_SECONDS
        return {block_hash: held[block_hash] for block_hash in used if block_hash in held}
