"""Blocks that were pulled before the request that they are for: its hits on them are hits of other
engines' caches.

Knows hashes and blocks; knows nothing about how they came.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...kv.block_pool import BlockPool

MOST_BLOCKS = 1 << 16
"""Blocks that are remembered until a request finds them; the oldest go first."""


class PrefetchedBlocks:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Keyed by hash: the block that was filled, and its generation."""

    def note(self, block_hash: bytes, block: int) -> None:
        """Notes that a cached block was pulled ahead of its request."""
        self._known[block_hash] = block, self._pool.generations[block]
        self._known.move_to_end(block_hash)
        if len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)

    def take(self, hashes: Sequence[bytes]) -> int:
        """Number of tokens in those of the cached blocks that were prefetched; each counts once."""
        if not self._known:
            return 0
        num_blocks = 0
        for block_hash in hashes:
            block, generation = self._known.pop(block_hash, (0, 0))
            num_blocks += (
                self._pool.find(block_hash) == block and self._pool.generations[block] == generation
            )
        return num_blocks * self._block_size
