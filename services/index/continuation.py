"""Positions at which a chain can be continued, by the marks of page kinds beside the hashes of
blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.engine_core.kv.prefix_hash import mark_of

ALL_BLOCKS = 0
"""`blocks_seen` of a kind that needs all blocks before a position."""
Has = Callable[[int, int], bool]
"""Whether a replica has the pages of a kind of the block at an index of a chain."""


def name_of(kind: int, block_hash: bytes) -> bytes:
    """Name of a block in events and the index, for a kind of its pages."""
    return mark_of(block_hash, kind) if kind else block_hash


def last_continued(blocks_seen: Sequence[int], has: Has, first: int, end: int) -> int:
    """The largest number of blocks of a chain, first + 1 … end, behind which a replica can continue
    it; 0: there is none. Only blocks from `first` on are asked for. Kinds that need all blocks are
    not asked: `end` is theirs."""
    while end > first:
        gap = _last_gap(blocks_seen, has, first, end)
        if gap is None:
            return end
        end = gap
    return 0


def _last_gap(blocks_seen: Sequence[int], has: Has, first: int, end: int) -> int | None:
    """Index of a block that keeps a chain from being continued behind `end` blocks, and behind any
    number between; None: there is none."""
    for kind, num_seen in enumerate(blocks_seen):
        if num_seen == ALL_BLOCKS:
            continue
        start = max(0, end - num_seen)
        for idx in range(end - 1, max(start, first) - 1, -1):
            if not has(kind, idx):
                return idx
        if start < first:
            return first
    return None
