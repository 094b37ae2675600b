"""Keys of pages that go to block sources and come back, by the kinds of page groups. Knows no
sources' insides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..page_groups import PageKind, page_key
from .prefix_cache import HeldPages


class Source(Protocol):
    """A holder of pages by their keys."""

    def find(self, hashes: Sequence[bytes]) -> int:
        """See `BlockSource`."""


class _Pages(NamedTuple):
    """Pages of a block that are taken together."""

    groups: range
    num_seen: int
    """Number of blocks before a position whose pages it needs; 0: all."""


class PageKeys:
    def __init__(
        self, kinds: Sequence[PageKind], block_size: int, set_groups: range = range(0)
    ) -> None:
        """`set_groups`: numbers of the pages of a state set, of which a position needs the one
        after the last block; empty: no state layers."""
        self._kinds = [_Pages(kind.groups, kind.num_seen(block_size)) for kind in kinds]
        self._set_groups = set_groups
        if set_groups:
            self._kinds.append(_Pages(set_groups, 1))
        self._num_groups = sum(len(kind.groups) for kind in self._kinds)

    @property
    def num_lasting(self) -> int:
        """Pages of a block that every later position sees, and that of the first group."""
        return len(self.of_blocks([b""]))

    def pages_of_block(self, kind: int) -> int:
        """Number of a block's pages that are of a kind."""
        return len(self._kinds[kind].groups)

    def num_found(self, source: Source, hashes: Sequence[bytes], num_here: int = 0) -> int:
        """Number of leading blocks that a sequence can continue with pages of a source: the source
        has their pages of the first group, those of other groups that the next position needs, and
        a snapshot. The device has the pages of the first `num_here` blocks that every later
        position needs."""
        num_blocks = num_here
        if missing := hashes[num_here:]:
            num_blocks += source.find(missing)
        if self._num_groups == 1:
            return num_blocks
        num_settled = 0
        while num_settled < len(self._kinds) and num_blocks:
            kind = self._kinds[num_settled % len(self._kinds)]
            end = self._continued(kind, source, hashes[:num_blocks], num_here)
            num_settled = num_settled + 1 if end == num_blocks else 0
            num_blocks = end
        return num_blocks

    def to_load(self, hashes: Sequence[bytes], num_here: int = 0) -> list[bytes]:
        """Keys of the pages of these blocks that the position after them needs, first group first.
        The device has the pages of the first `num_here` blocks that every later position needs."""
        return self.of_blocks(hashes[num_here:]) + self.of_end(hashes)

    def of_blocks(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Keys of the pages of these blocks that every later position needs, first group first."""
        keys = list(hashes)
        for groups, num_seen in self._kinds:
            if not num_seen:
                keys += [page_key(each, group) for group in groups if group for each in hashes]
        return keys

    def of_end(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Keys of the pages of these blocks that the position after them needs, and later ones do
        not: pages of windows, and of a snapshot."""
        keys = []
        for groups, num_seen in self._kinds:
            if num_seen:
                seen = hashes[-num_seen:]
                keys += [page_key(each, group) for group in groups if group for each in seen]
        return keys

    def of(
        self, kind: int, hashes: Sequence[bytes], held: HeldPages, parent: bytes
    ) -> tuple[list[bytes], list[bytes]]:
        """Keys of pages of a kind, and for each the hash of the block before, `parent` for the
        first. `hashes`: those of their blocks, as far as these are full."""
        groups = self._kinds[kind].groups
        hashes = hashes[: held.end - held.first]
        keys = [page_key(each, group) for each in hashes for group in groups]
        parents = [each for each in [parent, *hashes[:-1]] for _ in groups] if hashes else []
        return keys, parents

    def of_set(self, block_hash: bytes) -> list[bytes]:
        """Keys of the pages of the snapshot behind a block."""
        return [page_key(block_hash, group) for group in self._set_groups]

    def _continued(
        self, kind: _Pages, source: Source, hashes: Sequence[bytes], num_here: int
    ) -> int:
        """Largest number of these blocks for which the source has all pages of a kind that the next
        position needs; see `num_found`."""
        first = 0 if kind.num_seen else min(num_here, len(hashes))
        num_found = 0
        for idx in reversed(range(first, len(hashes))):
            keys = [page_key(hashes[idx], group) for group in kind.groups]
            if source.find(keys) < len(keys):
                num_found = 0
                continue
            num_found += 1
            if num_found == kind.num_seen or idx == first:
                return idx + num_found
        return first
