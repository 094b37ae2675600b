"""Keys of pages that go to block sources and come back, by the kinds of page groups. Knows no
sources' insides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..page_groups import PageKind, page_key
from .prefix_cache import HeldPages


class Source(Protocol):
    """A holder of pages by their keys."""

    def find(self, hashes: Sequence[bytes]) -> int:
        """See `BlockSource`."""


class PageKeys:
    def __init__(self, kinds: Sequence[PageKind], block_size: int) -> None:
        self._kinds = tuple(kinds)
        self._num_groups = sum(len(kind.groups) for kind in self._kinds)
        self._num_seen = [kind.num_seen(block_size) for kind in self._kinds]

    def num_found(self, source: Source, hashes: Sequence[bytes]) -> int:
        """Leading blocks after which a sequence can be continued with pages of a source: it has
        those of the first group, and those of others that the next position sees."""
        num_blocks = source.find(hashes)
        if self._num_groups == 1:
            return num_blocks
        num_settled = 0
        while num_settled < len(self._kinds) and num_blocks:
            kind = num_settled % len(self._kinds)
            end = self._continued(kind, source, hashes[:num_blocks])
            num_settled = num_settled + 1 if end == num_blocks else 0
            num_blocks = end
        return num_blocks

    def to_load(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Keys of the pages of these blocks that the position after them sees, those of the first
        group before others."""
        keys = list(hashes)
        for kind, num_seen in zip(self._kinds, self._num_seen, strict=True):
            seen = hashes[-num_seen:] if num_seen else hashes
            keys += [page_key(each, group) for group in kind.groups if group for each in seen]
        return keys

    def of(
        self, kind: int, hashes: Sequence[bytes], held: HeldPages, parent: bytes
    ) -> tuple[list[bytes], list[bytes]]:
        """Keys of pages of a kind, and the hashes of the blocks before them, of which the first is
        `parent`. `hashes` are those of their blocks, as far as these are full."""
        groups = self._kinds[kind].groups
        hashes = hashes[: held.end - held.first]
        keys = [page_key(each, group) for each in hashes for group in groups]
        parents = [each for each in [parent, *hashes[:-1]] for _ in groups] if hashes else []
        return keys, parents

    def _continued(self, kind: int, source: Source, hashes: Sequence[bytes]) -> int:
        """The largest number of these blocks after which the source has all pages of a kind that
        the next position sees."""
        num_seen = self._num_seen[kind]
        num_found = 0
        for idx in reversed(range(len(hashes))):
            if not self._has(source, kind, hashes[idx]):
                num_found = 0
                continue
            num_found += 1
            if num_found == num_seen or idx == 0:
                return idx + num_found
        return 0

    def _has(self, source: Source, kind: int, block_hash: bytes) -> bool:
        return all(source.find([page_key(block_hash, group)]) for group in self._kinds[kind].groups)
