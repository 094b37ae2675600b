"""Cached state sets: with one, a sequence is continued behind a block without what came before.

Knows keys and the block pool; knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..page_groups import PageKind, page_key
from .block_pool import BlockPool
from .continuations import Continuations
from .prefix_cache import HashChain, Hits, PrefixCache


class Snapshots:
    """State sets by the hash of the block before their own: its border is where they begin."""

    def __init__(self, pool: BlockPool, groups: range) -> None:
        """`groups`: a number for each page of a set, after the numbers of page groups."""
        self._pool = pool
        self._groups = groups
        self._readers: dict[int, tuple[int, int]] = {}
        """Keyed by first page of a set: the page's generation, and how many chains are known to go
        on from it."""
        self._superseded: dict[int, bytes] = {}
        """Hashes of sets for which a chain has a later one, by first page."""

    def cache(self, block_hash: bytes, pages: Sequence[int]) -> None:
        """Registers a held set under its hash, unless another set already is."""
        if self.find(block_hash):
            return
        for group, page in zip(self._groups, pages, strict=True):
            key = page_key(block_hash, group)
            # Some pages of a set that lost others may remain.
            if (left := self._pool.find(key)) is not None:
                self._pool.uncache(left)
            self._pool.cache_page(page, key)

    def note_read(self, block_hash: bytes, num_chains: int = 1) -> None:
        """Notes that so many more chains go on from a snapshot."""
        if pages := self.find(block_hash):
            count = self._num_readers(pages[0]) + num_chains
            self._readers[pages[0]] = self._pool.generations[pages[0]], count
            self._superseded.pop(pages[0], None)

    def supersede(self, block_hash: bytes, num_chains: int = 1) -> None:
        """Lets a snapshot be evicted first if at most `num_chains` chains continue from it, since
        they have a later one."""
        pages = self.find(block_hash)
        if pages and self._num_readers(pages[0]) <= num_chains:
            self._superseded[pages[0]] = block_hash
            self._pool.share(pages, is_move=True)
            self._pool.release(pages, is_early=True)

    def renew(self, block_hash: bytes) -> None:
        """Lets a snapshot be evicted no earlier than others: no chain has a later one after all."""
        pages = self.find(block_hash)
        if pages and self._superseded.pop(pages[0], None) is not None:
            self._pool.share(pages, is_move=True)
            self._pool.release(pages)

    def is_superseded(self, block_hash: bytes, pages: Sequence[int]) -> bool:
        """Whether these pages, which may be held, are a set that is evicted first."""
        return self._superseded.get(pages[0]) == block_hash

    @property
    def num_superseded(self) -> int:
        """Snapshots that are evicted before anything else."""
        return sum(
            self.find(block_hash)[:1] == [page] for page, block_hash in self._superseded.items()
        )

    def _num_readers(self, page: int) -> int:
        generation, count = self._readers.get(page, (0, 0))
        return count if generation == self._pool.generations[page] else 0

    def uncache(self, pages: Sequence[int]) -> None:
        """Forgets a set, if it can be found. Pages of a set that is held are cached together."""
        if self._pool.hash_of(pages[0]) is not None:
            for page in pages:
                self._pool.uncache(page)

    def find(self, block_hash: bytes) -> list[int]:
        """Pages of a set; empty where one is gone."""
        pages = []
        for group in self._groups:
            if (page := self._pool.find(page_key(block_hash, group))) is None:
                return []
            pages.append(page)
        return pages


class SnapshotCache(PrefixCache):
    """A `PrefixCache` of a model with state layers: a sequence is continued where it has a
    snapshot beside what its other layers see."""

    def __init__(
        self, pool: BlockPool, kinds: Sequence[PageKind], block_size: int, num_pages: int
    ) -> None:
        """`num_pages`: of a state set."""
        super().__init__(pool, kinds, block_size)
        num_groups = self._kinds[-1].groups.stop
        set_groups = range(num_groups, num_groups + num_pages)
        self.snapshots = Snapshots(pool, set_groups)
        self._continuations = Continuations(
            pool, [*(kind.groups for kind in self._kinds[1:]), set_groups]
        )
        self.fresh: set[bytes] = set()
        """Hashes of blocks whose snapshots the step in planning writes: they are not read before
        the next step."""

    @property
    def num_found(self) -> int:
        """Snapshots that can be found."""
        return self._continuations.counts[-1]

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that no later one of their chain supersedes."""
        return self.num_found - self.snapshots.num_superseded

    def match(self, chain: HashChain, max_blocks: int) -> Hits:
        found = super().match(chain, max_blocks)
        num_cached = found.num_blocks
        end = num_cached
        while end:
            end, pages = self._last_snapshot(chain, end)
            if end < found.num_blocks:
                found = super().match(chain, end)
            if end == found.num_blocks:
                return found._replace(snapshot=pages, num_cached=num_cached)
            end = found.num_blocks
        return super().match(chain, 0)._replace(num_cached=num_cached)

    def _last_snapshot(self, chain: HashChain, end: int) -> tuple[int, list[int]]:
        """The largest number of the chain's blocks, up to `end`, with a snapshot after them, and
        its pages."""
        for num_blocks in range(end, 0, -1):
            block_hash = chain.hashes[num_blocks - 1]
            pages = self.snapshots.find(block_hash)
            if pages and block_hash not in self.fresh:
                return num_blocks, pages
        return 0, []
