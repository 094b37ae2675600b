"""Leading blocks of sequences that are cached, and the events that subscribers get of them.

Knows hash chains and the block pool; knows nothing about steps, rows or executors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..step_output import CacheEvents, StoredChain
from .block_pool import BlockPool
from .block_source import Owner
from .prefix_hash import TokenArray, block_hashes, next_block_hash, num_common, token_bytes


@dataclass(slots=True)
class HashChain:
    """The hashes of a sequence's full blocks; the first `num_cached` blocks were offered to the
    cache."""

    namespace: bytes
    tenant: str = ""
    hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0

    @property
    def owner(self) -> Owner:
        return Owner(self.namespace, self.tenant)

    @property
    def tip(self) -> bytes:
        """Hash that the next block's hash continues."""
        return self.hashes[-1] if self.hashes else self.namespace

    def parent_of(self, idx: int) -> bytes:
        """The hash before block `idx`; empty before the first."""
        return self.hashes[idx - 1] if idx else b""

    def cover(self, token_ids: npt.NDArray[np.int32], block_size: int) -> None:
        """Adds the hashes of the blocks that `token_ids`, the whole sequence, fills beyond what is
        hashed."""
        self.hashes += block_hashes(
            self.tip, token_ids[len(self.hashes) * block_size :], block_size
        )

    def num_shared(self, other: HashChain) -> int:
        """Leading blocks that two sequences have in common."""
        return num_common(self.hashes, other.hashes)


class Hits(NamedTuple):
    """Cached blocks with which a sequence can be continued."""

    first: int
    """Index of the first one: no layer sees the blocks before it any more."""
    blocks: list[int]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the sequence that need not be computed."""
        return self.first + len(self.blocks)


class PrefixCache:
    """Looks up chains, offers blocks, collects events."""

    def __init__(self, pool: BlockPool, reach: int = 0) -> None:
        """`reach`: blocks before a position that its layers see; 0: all."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_hits_by_tier = Counter[str]()
        """Number of hit tokens that a block source brought, by its tier."""
        self._pool = pool
        self._reach = reach
        self._stored: list[StoredChain] = []
        self._gained: dict[bytes, bytes] = {}
        """Parents by hash of blocks that a source got since the last events, and that were cached
        nowhere before."""

    def match(self, chain: HashChain, max_blocks: int) -> Hits:
        """The cached blocks with which the sequence can be continued behind as many of its tokens
        as possible, at most `max_blocks`; not held yet."""
        hashes = chain.hashes[: max(max_blocks, 0)]
        return self._seen_last(hashes) if self._reach else Hits(0, self._pool.find_leading(hashes))

    def _seen_last(self, hashes: Sequence[bytes]) -> Hits:
        """The last blocks of which all that the next position sees are cached."""
        found: list[int] = []
        for first in reversed(range(len(hashes))):
            block = self._pool.find(hashes[first])
            if block is None:
                found.clear()
                continue
            found.append(block)
            if len(found) == self._reach or first == 0:
                return Hits(first, found[::-1])
        return Hits(0, [])

    def count(self, num_tokens: int, num_hits: int, by_tier: Mapping[str, int]) -> None:
        """Notes that a prompt of `num_tokens` found `num_hits` of them, and how many of these block
        sources brought."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits
        self.num_hits_by_tier.update(by_tier)

    def offer(self, chain: HashChain, blocks: Sequence[int]) -> list[StoredChain]:
        """Caches the sequence's next `blocks`; returns what is new, to be announced once it is
        computed.

        A block whose hash another block already has stays out: one copy is enough to hit.
        """
        start = chain.num_cached
        end = chain.num_cached + len(blocks)
        chain.num_cached = end
        return self._cache_run(
            chain.hashes[start - 1] if start else b"", chain.hashes[start:end], blocks
        )

    def adopt(self, parent: bytes, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Caches and announces loaded blocks that continue `parent` (a block hash, or empty). No
        block may be allocated before the next `take_events`: an eviction would be told before
        them."""
        self._stored += self._cache_run(parent, hashes, blocks)

    def append(
        self, chains: Iterable[HashChain], token_ids: TokenArray, blocks: Sequence[int]
    ) -> None:
        """Hashes, caches and announces the next block of each of some sequences, which is computed;
        `token_ids` are those of these blocks, one block after another."""
        data = token_bytes(token_ids)
        cache = self._pool.cache
        announce = self._stored.append
        stride = len(data) // len(blocks)
        start = 0
        for chain, block in zip(chains, blocks, strict=True):
            hashes = chain.hashes
            parent = hashes[-1] if hashes else b""
            block_hash = next_block_hash(parent or chain.namespace, data[start : start + stride])
            if cache(block, block_hash):
                announce(StoredChain(parent, [block_hash]))
            hashes.append(block_hash)
            chain.num_cached += 1
            start += stride

    def note_gained(self, parent: bytes, block_hash: bytes) -> None:
        """Announces a block that a block source is about to hold, unless it is cached already."""
        if not self._pool.has(block_hash):
            self._gained[block_hash] = parent

    def note_lost(self, hashes: Sequence[bytes]) -> None:
        """Notes that a block source holds these hashes no longer."""
        for block_hash in self._pool.lacking(hashes):
            if self._gained.pop(block_hash, None) is None:
                self._pool.note_gone(block_hash)

    def announce(self, stored: list[StoredChain]) -> None:
        """Lets chains that are computed now go out with the next events."""
        self._stored += stored

    def _cache_run(
        self, parent: bytes, hashes: Sequence[bytes], blocks: Sequence[int]
    ) -> list[StoredChain]:
        stored: list[StoredChain] = []
        cache = self._pool.cache
        run = None
        for block_hash, block in zip(hashes, blocks, strict=True):
            if not cache(block, block_hash):
                run = None
            elif run is not None:
                run.append(block_hash)
            else:
                run = [block_hash]
                stored.append(StoredChain(parent=parent, hashes=run))
            parent = block_hash
        return stored

    def take_events(self) -> CacheEvents | None:
        """Changes since the last call; evictions come first, as they did."""
        removed = self._pool.take_evicted()
        if not removed and not self._stored and not self._gained:
            return None
        stored = self._stored
        self._stored = []
        stored += [
            StoredChain(parent=parent, hashes=[block_hash])
            for block_hash, parent in self._gained.items()
        ]
        self._gained.clear()
        return CacheEvents(stored=stored, removed=removed)
