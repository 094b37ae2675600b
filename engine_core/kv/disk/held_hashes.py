"""Hashes of the blocks that a disk holds, in order of use."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence

TOUCH_SECONDS = 60.0
"""Time between two notes in files of when their blocks were used. Most blocks are used often, on
the device."""


class HeldHashes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.namespace_of: OrderedDict[bytes, bytes] = OrderedDict()
        """Keyed by hash, the least recently used first."""
        self._used: dict[bytes, None] = {}
        """Hashes whose files have not been marked as used yet, in order of use."""
        self._touch_at = 0.0
        self._reading = Counter[bytes]()
        """Number of loads and leases that read a hash, whose file is kept."""

    def __len__(self) -> int:
        return len(self.namespace_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.namespace_of

    @property
    def num_reading(self) -> int:
        """Hashes that loads and leases read."""
        return len(self._reading)

    def add_oldest(self, block_hash: bytes, namespace: bytes) -> None:
        """Adds a hash as the least recently used one."""
        self.namespace_of[block_hash] = namespace
        self.namespace_of.move_to_end(block_hash, last=False)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Marks hashes that are held as used, the first of a sequence last."""
        for block_hash in reversed(hashes):
            if block_hash in self.namespace_of:
                self.namespace_of.move_to_end(block_hash)
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

    def begin_reading(self, hashes: Sequence[bytes]) -> None:
        self._reading.update(hashes)

    def end_reading(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._reading[block_hash] -= 1
            if not self._reading[block_hash]:
                del self._reading[block_hash]

    def oldest(self, kept: Collection[bytes]) -> bytes | None:
        """The least recently used hash that is neither read nor in `kept`."""
        unused = (
            each for each in self.namespace_of if each not in kept and each not in self._reading
        )
        return next(unused, None)
