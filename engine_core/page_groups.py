"""Groups of layers whose KV blocks have tables of their own, over one pool of pages.

A page holds the keys and values of one block for the layers of one group. Groups whose layers see
the same keys are a kind: their pages are taken and given back together. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

HASH_LEN = 16
"""Bytes of a block's hash."""


class PageKind(NamedTuple):
    """Page groups whose layers see the same keys."""

    window: int
    """Positions that the layers see, their own included: pages before them are given back as a
    sequence grows. 0: all."""
    groups: range

    def num_seen(self, block_size: int) -> int:
        """Blocks before a position at the beginning of a block that it sees; 0: all."""
        return max(-(-(self.window - 1) // block_size), 1) if self.window else 0

    def first_seen(self, position: int, block_size: int) -> int:
        """Index of the first block that a position sees."""
        return max(0, position + 1 - self.window) // block_size if self.window else 0


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Bytes of pages, and bytes of their contents when they are full."""

    page: int = 0
    """Bytes of a page; 0: not known, as of a simulated cache."""
    filled: tuple[int, ...] = ()
    """Bytes of a page of each page group that hold keys and values. The others pad it."""
    of_set: int = 0
    """Bytes of a state set that its units fill."""
    has_latents: bool = False
    """Whether pages hold latents in place of keys and values."""

    def by_kind(self, kinds: Iterable[PageKind], counts: Iterable[int]) -> dict[str, int]:
        """Bytes of counts[i] pages of kinds[i], by `full`, `window` or `latent`; empty: sizes are
        not known."""
        of_full = "latent" if self.has_latents else "full"
        found: dict[str, int] = {}
        for kind, count in zip(kinds, counts, strict=True) if self.page else ():
            name = "window" if kind.window else of_full
            found[name] = found.get(name, 0) + count * self.page
        return found

    def padding(self, kind: PageKind) -> float:
        """Unused bytes of a full page of a kind, on average over its groups."""
        return self.page - self._of_kind(kind) / len(kind.groups)

    def of_slot(self, kind: PageKind, block_size: int) -> float:
        """Bytes of a token in the pages of a kind."""
        return self._of_kind(kind) / block_size

    def described(self, kinds: Iterable[PageKind], state_pages: int) -> str:
        """Sizes by kind of layer, for a log. `state_pages`: of a state set; 0: there are none."""
        shares = {
            name: 1 - self._of_kind(kind) / (len(kind.groups) * self.page)
            for kind in kinds
            for name in self.by_kind([kind], [0])
        }
        parts = [f"{name} pads {share:.1%} of its pages" for name, share in shares.items()]
        if state_pages:
            set_bytes = state_pages * self.page
            share = 1 - self.of_set / set_bytes
            parts.append(f"state sets of {set_bytes / 1e6:.1f} MB pad {share:.1%}")
        return f"pages of {self.page / 1e6:.3f} MB: {', '.join(parts)}"

    def _of_kind(self, kind: PageKind) -> int:
        return sum(self.filled[kind.groups.start : kind.groups.stop])


FULL = PageKind(0, range(1))
"""The only kind of a model without windows."""


def kinds_of(windows: Sequence[int]) -> tuple[PageKind, ...]:
    """The kinds of page groups with these windows; equal ones are adjacent."""
    found: list[PageKind] = []
    for window, same in groupby(windows):
        first = found[-1].groups.stop if found else 0
        found.append(PageKind(window, range(first, first + len(list(same)))))
    return tuple(found)


def page_key(block_hash: bytes, group: int) -> bytes:
    """Key by which the page of a block is cached for a page group. That of the first group is the
    block's hash."""
    if group > 255:
        return block_hash + group.to_bytes(2)
    return block_hash + bytes((group,)) if group else block_hash


def block_of(key: bytes) -> bytes:
    """Hash of the block whose page has this key."""
    return key[:HASH_LEN]


def num_blocks_of(keys: Iterable[bytes]) -> int:
    """Blocks whose page of the first group is among these."""
    return sum(map(is_block_hash, keys))


def is_block_hash(key: bytes) -> bool:
    """Whether a page's key is the hash of its block, which events and the prefix index name."""
    return len(key) <= HASH_LEN
