"""Events about page kinds behind the first: behind which blocks a chain can be continued.

A block's own hash stands for its page of the first group. For each kind behind the first, and for
state sets, a *mark* stands for all pages of the block's kind. Knows the pool; knows no chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..page_groups import HASH_LEN, page_key
from ..step_output import StoredChain
from .block_pool import BlockPool
from .prefix_hash import mark_of


class Continuations:
    def __init__(self, pool: BlockPool, kinds: Sequence[range]) -> None:
        """`kinds`: page groups of each kind after the first."""
        self._pool = pool
        self._kinds = tuple(kinds)
        self._marks: dict[bytes, int] = {}
        """Keyed by hash of each announced block, a bit for each kind whose mark was announced."""
        self._early: set[bytes] = set()
        """Hashes of blocks that are not announced, with cached pages of a kind."""
        self.counts = [0] * len(self._kinds)
        """Marks that count, by kind."""

    def add_marks(self, stored: list[StoredChain], removed: list[bytes]) -> None:
        """Adds the marks of blocks to their events. A mark is announced with its block or later,
        with the block as its parent, so that both are in the same shard of the index."""
        touched = dict.fromkeys(key[:HASH_LEN] for key in self._pool.take_changed())
        if not self._kinds:
            return
        for block_hash in list(removed):
            bits = self._marks.pop(block_hash, 0)
            self._count(bits, 0)
            if bits:
                # The pages of the block may outlive it, and it may be cached again.
                self._early.add(block_hash)
            removed += self._named(block_hash, bits)
        for chain in stored:
            for block_hash in chain.hashes:
                self._marks.setdefault(block_hash, 0)
                if block_hash in self._early:
                    self._early.remove(block_hash)
                    touched[block_hash] = None
        for block_hash in touched:
            bits = self._bits_of(block_hash)
            if (known := self._marks.get(block_hash)) is None:
                self._early.discard(block_hash)
                if bits:
                    self._early.add(block_hash)
                continue
            self._marks[block_hash] = bits
            self._count(known, bits)
            removed += self._named(block_hash, known & ~bits)
            if gained := self._named(block_hash, bits & ~known):
                stored.append(StoredChain(block_hash, gained))

    @property
    def announced(self) -> Iterator[bytes]:
        """Marks of blocks as they are announced to routers."""
        for block_hash, bits in self._marks.items():
            yield from self._named(block_hash, bits)

    def _bits_of(self, block_hash: bytes) -> int:
        """A bit for each kind of which all pages of a block are cached."""
        return sum(
            self._pool.has_all([page_key(block_hash, group) for group in groups]) << kind
            for kind, groups in enumerate(self._kinds)
        )

    def _count(self, before: int, after: int) -> None:
        if before != after:
            for kind in range(len(self._kinds)):
                self.counts[kind] += (after >> kind & 1) - (before >> kind & 1)

    def _named(self, block_hash: bytes, bits: int) -> list[bytes]:
        """Marks of a block for the kinds of these bits."""
        return [
            mark_of(block_hash, kind + 1) for kind in range(len(self._kinds)) if bits >> kind & 1
        ]
