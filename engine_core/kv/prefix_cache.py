"""Leading blocks of sequences that are cached, and the events that subscribers get of them.

Knows hash chains and the block pool; knows nothing about steps, rows or executors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..page_groups import FULL, PageKind, is_block_hash, page_key
from ..step_output import CacheEvents, StoredChain
from .block_pool import BlockPool
from .block_source import Owner
from .continuations import Continuations
from .prefix_hash import (
    Front,
    TokenArray,
    behind_front,
    block_hashes,
    next_block_hashes,
    num_common,
    token_bytes,
)
from .value.turn import UNKNOWN, Turn, moved


@dataclass(slots=True)
class HashChain:
    """The hashes of a sequence's full blocks; the first `num_cached` blocks were offered to the
    cache."""

    namespace: bytes
    tenant: str = ""
    hashes: list[bytes] = field(default_factory=list)
    front: Front | None = None
    """Leading blocks that other tenants share; None: there are none."""
    num_cached: int = 0
    turn: Turn = UNKNOWN
    """Turn that uses these blocks, for eviction by value."""

    @property
    def owner(self) -> Owner:
        return Owner(self.namespace, self.tenant)

    @property
    def moved_turn(self) -> Turn:
        """Turn of blocks that are released before the sequence ends; only the sequence inherits the
        value of its session."""
        if self.turn is UNKNOWN:
            return moved(self.tenant)
        return self.turn.part(self.turn.kind)

    @property
    def tip(self) -> bytes:
        """Hash that the next block's hash continues."""
        return self.base_of(len(self.hashes))

    def base_of(self, idx: int) -> bytes:
        """Hash that the hash of block `idx` continues."""
        front = self.front
        if not idx:
            return self.namespace if front is None else front.namespace
        before = self.hashes[idx - 1]
        if front is not None and idx == front.num_blocks:
            return behind_front(self.namespace, before)
        return before

    def parent_of(self, idx: int) -> bytes:
        """The hash before block `idx`; empty before the first."""
        return self.hashes[idx - 1] if idx else b""

    def cover(self, token_ids: npt.NDArray[np.int32], block_size: int) -> None:
        """Adds the hashes of the blocks that `token_ids`, the whole sequence, fills beyond what is
        hashed."""
        ends = [len(token_ids)]
        if self.front is not None and len(self.hashes) < self.front.num_blocks:
            ends.insert(0, self.front.num_blocks * block_size)
        for end in ends:
            unhashed = token_ids[len(self.hashes) * block_size : end]
            self.hashes += block_hashes(self.tip, unhashed, block_size)

    def num_shared(self, other: HashChain) -> int:
        """Leading blocks that two sequences have in common."""
        return num_common(self.hashes, other.hashes)


class HeldPages(NamedTuple):
    """Pages of one kind that a sequence has."""

    first: int
    """Index of the first block that the sequence still has: no layer sees those before it."""
    end: int
    """Index after its last block."""
    pages: list[int]
    """Pages of these blocks, block by block."""

    def cut(self, end: int) -> tuple[HeldPages, list[int]]:
        """The pages before block `end`, and pages of the others."""
        end = max(self.first, min(self.end, end))
        per_block = len(self.pages) // max(1, self.end - self.first)
        num_pages = (end - self.first) * per_block
        return HeldPages(self.first, end, self.pages[:num_pages]), self.pages[num_pages:]


class Hits(NamedTuple):
    """Cached blocks with which a sequence can be continued."""

    num_blocks: int
    """Number of blocks of the sequence that need not be computed."""
    held: tuple[HeldPages, ...]
    """Pages of each kind that the next position sees."""
    snapshot: Sequence[int] = ()
    """Pages of the state set with which it is continued; empty without state layers."""
    num_cached: int = 0
    """Number of leading cached blocks; with state layers also those without a snapshot after
    them."""

    @property
    def pages(self) -> list[int]:
        """Pages of all kinds."""
        if len(self.held) == 1:
            return self.held[0].pages
        return [page for each in self.held for page in each.pages]


NO_HITS = Hits(0, ())


class PrefixCache:
    """Looks up chains, offers blocks, collects events. A block's hash stands for its page of the
    first group in all that is announced."""

    def __init__(
        self, pool: BlockPool, kinds: Sequence[PageKind] = (FULL,), block_size: int = 1
    ) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_hits_by_tier = Counter[str]()
        """Number of hit tokens that a block source loaded, by its tier."""
        self._pool = pool
        self._kinds = tuple(kinds)
        self._num_seen = [kind.num_seen(block_size) for kind in self._kinds]
        """Number of blocks before a position that each kind needs; 0: all."""
        self._stored: list[StoredChain] = []
        self._continuations = Continuations(pool, [kind.groups for kind in self._kinds[1:]])
        self._gained: dict[bytes, bytes] = {}
        """Parents by hash of blocks that a source got since the last events, and that were cached
        nowhere before."""

    def match(self, chain: HashChain, max_blocks: int) -> Hits:
        """The cached blocks that let the sequence continue after as many of its tokens as possible,
        at most `max_blocks` blocks; no reference is taken."""
        hashes = chain.hashes[: max(max_blocks, 0)]
        held = list[HeldPages]()
        # If a kind matches fewer blocks than the kinds before it, these are matched again up to
        # there.
        while len(held) < len(self._kinds):
            found = self._continued(len(held), hashes)
            if found.end < len(hashes):
                hashes = hashes[: found.end]
                if held:
                    held = []
                    continue
            held.append(found)
        return Hits(len(hashes), tuple(held))

    def num_leading(self, chain: HashChain, max_blocks: int) -> int:
        """Leading blocks of a sequence whose pages of the first kind are cached."""
        return self._continued(0, chain.hashes[: max(max_blocks, 0)]).end

    def _continued(self, kind: int, hashes: Sequence[bytes]) -> HeldPages:
        """The pages of a kind with which a sequence can continue after as many of these blocks as
        possible."""
        groups = self._kinds[kind].groups
        if self._num_seen[kind]:
            return self._seen_last(groups, self._num_seen[kind], hashes)
        if len(groups) == 1:
            pages = self._pool.find_leading(hashes)
            return HeldPages(0, len(pages), pages)
        pages = []
        for block_hash in hashes:
            if (found := self._pages_of(groups, block_hash)) is None:
                break
            pages += found
        return HeldPages(0, len(pages) // len(groups), pages)

    def _seen_last(self, groups: range, num_seen: int, hashes: Sequence[bytes]) -> HeldPages:
        """The last blocks of which all that the next position sees are cached."""
        found: list[list[int]] = []
        for first in reversed(range(len(hashes))):
            pages = self._pages_of(groups, hashes[first])
            if pages is None:
                found.clear()
                continue
            found.append(pages)
            if len(found) == num_seen or first == 0:
                held = [page for block in reversed(found) for page in block]
                return HeldPages(first, first + len(found), held)
        return HeldPages(0, 0, [])

    def _pages_of(self, groups: range, block_hash: bytes) -> list[int] | None:
        """A block's pages of these groups; None where one is not cached."""
        pages = []
        for group in groups:
            if (page := self._pool.find(page_key(block_hash, group))) is None:
                return None
            pages.append(page)
        return pages

    def count(self, num_tokens: int, num_hits: int, by_tier: Mapping[str, int]) -> None:
        """Counts a prompt of `num_tokens` tokens that found `num_hits` cached, and by tier how many
        of them block sources loaded."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits
        self.num_hits_by_tier.update(by_tier)

    def offer(
        self, chain: HashChain, pages: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[StoredChain]:
        """Caches the sequence's next blocks by their pages of the first page group and of the
        others; returns what is new, to be announced once it is computed.

        A page whose key another one already has stays out: one copy is enough to hit.
        """
        start = chain.num_cached
        end = chain.num_cached + len(pages)
        chain.num_cached = end
        hashes = chain.hashes[start:end]
        self._cache_others(hashes, others)
        return self._cache_run(chain.hashes[start - 1] if start else b"", hashes, pages)

    def adopt(self, parent: bytes, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Caches and announces loaded blocks that continue `parent` (a block hash, or empty). No
        block may be allocated before the next `take_events`: an eviction would be told before
        them."""
        self._stored += self._cache_run(parent, hashes, blocks)

    def adopt_others(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Caches loaded pages of groups after the first."""
        for key, page in zip(keys, pages, strict=True):
            self._pool.cache_page(page, key)

    def append(
        self,
        chains: Sequence[HashChain],
        token_ids: TokenArray,
        pages: Sequence[int],
        others: Sequence[Sequence[int]] = (),
    ) -> None:
        """Hashes, caches and announces the next computed block of each of some sequences;
        `token_ids` are the tokens of these blocks, concatenated. Pages as in `offer`."""
        parents = [chain.hashes[-1] if chain.hashes else b"" for chain in chains]
        bases = [
            (parent or chain.namespace) if chain.front is None else chain.tip
            for parent, chain in zip(parents, chains, strict=True)
        ]
        hashed = next_block_hashes(bases, token_bytes(token_ids))
        for chain, block_hash in zip(chains, hashed, strict=True):
            chain.hashes.append(block_hash)
            chain.num_cached += 1
        are_new = self._pool.cache_each(pages, hashed)
        self._stored += [
            StoredChain(parent, [block_hash])
            for parent, block_hash, is_new in zip(parents, hashed, are_new, strict=True)
            if is_new
        ]
        self._cache_others(hashed, others)

    def note_gained(self, parent: bytes, block_hash: bytes) -> None:
        """Announces a block that a block source is about to hold, unless it is cached already.
        `block_hash` may be the key of another page of it."""
        if not is_block_hash(block_hash):
            self._pool.note_gained(block_hash)
        elif not self._pool.has(block_hash):
            self._gained[block_hash] = parent

    def note_lost(self, hashes: Sequence[bytes]) -> None:
        """Notes that a block source holds these hashes no longer."""
        for block_hash in self._pool.lacking(hashes):
            if self._gained.pop(block_hash, None) is None:
                self._pool.note_gone(block_hash)

    def announce(self, stored: list[StoredChain]) -> None:
        """Lets chains that are computed now go out with the next events."""
        self._stored += stored

    def _cache_others(self, hashes: Sequence[bytes], others: Sequence[Sequence[int]]) -> None:
        """Caches pages of all groups but the first of blocks with these hashes."""
        for group, pages in enumerate(others, start=1):
            for block_hash, page in zip(hashes, pages, strict=True):
                self._pool.cache_page(page, page_key(block_hash, group))

    def _cache_run(
        self, parent: bytes, hashes: Sequence[bytes], blocks: Sequence[int]
    ) -> list[StoredChain]:
        stored: list[StoredChain] = []
        are_new = self._pool.cache_each(blocks, hashes)
        run = None
        for block_hash, is_new in zip(hashes, are_new, strict=True):
            if not is_new:
                run = None
            elif run is not None:
                run.append(block_hash)
            else:
                run = [block_hash]
                stored.append(StoredChain(parent=parent, hashes=run))
            parent = block_hash
        return stored

    @property
    def marks(self) -> Iterator[bytes]:
        """Marks that were announced and count; see `Continuations`."""
        return self._continuations.announced

    def take_events(self) -> CacheEvents | None:
        """Changes since the last call, evictions before what took their place."""
        removed = self._pool.take_evicted()
        stored = self._stored
        self._stored = []
        stored += [
            StoredChain(parent=parent, hashes=[block_hash])
            for block_hash, parent in self._gained.items()
        ]
        self._gained.clear()
        self._continuations.add_marks(stored, removed)
        if not removed and not stored:
            return None
        return CacheEvents(stored=stored, removed=removed)
