"""Facts about blocks that outlast a stay in the cache: how many chains use them, and hints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

COUNT_SECONDS = 1.0
"""Seconds for which a count of kept blocks is reused."""


class BlockNotes:
    def __init__(self) -> None:
        self._others: dict[int, int] = {}
        """Number of chains, beside the first, that are known to use a block, by block; most blocks
        have none."""
        self._rounds: dict[int, int] = {}
        """Number of times that a chain has returned so far, by the last block of the stay that
        returned."""
        self._kept_until: dict[int, float] = {}
        """Time until which a hint keeps a block, by block."""
        self._num_kept = 0
        self._counted_at = -math.inf

    def note_other(self, blocks: Iterable[int]) -> None:
        """Notes that one more chain uses these blocks."""
        others = self._others
        for block in blocks:
            others[block] = others.get(block, 0) + 1

    def runs(self, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Beginning, end and level of each run of blocks with about as many users. The level is 0
        for one user, 1 for up to 3, 2 for up to 7, and 3 for more."""
        others = self._others
        if not others or others.keys().isdisjoint(blocks):
            return [(0, len(blocks), 0)]
        levels = [_level(others.get(block, 0)) for block in blocks]
        starts = [0, *(idx for idx in range(1, len(blocks)) if levels[idx] != levels[idx - 1])]
        ends = [*starts[1:], len(blocks)]
        return [(start, end, levels[start]) for start, end in zip(starts, ends, strict=True)]

    def note_return(self, block: int, num_rounds: int) -> None:
        self._rounds[block] = num_rounds

    def take_rounds(self, blocks: Sequence[int]) -> int:
        """Number of times that the chain of these blocks has returned; 0 for blocks of several
        chains."""
        rounds = self._rounds
        others = self._others
        most = 0
        if not rounds or rounds.keys().isdisjoint(blocks):
            return most
        for block in blocks:
            if block in rounds:
                found = rounds.pop(block)
                if block not in others:
                    most = max(most, found)
        return most

    def keep(self, blocks: Sequence[int], until: float) -> float:
        """Keeps blocks up to a time; returns up to when any of them is kept."""
        kept_until = self._kept_until
        if until:
            for block in blocks:
                kept_until[block] = max(until, kept_until.get(block, 0.0))
        elif not kept_until:
            return 0.0
        return max(kept_until.get(block, 0.0) for block in blocks)

    def num_kept(self, now: float) -> int:
        """Blocks that a hint keeps, counted at most once a second: each step asks."""
        if now - self._counted_at >= COUNT_SECONDS:
            self._kept_until = {
                block: until for block, until in self._kept_until.items() if until > now
            }
            self._num_kept = len(self._kept_until)
            self._counted_at = now
        return self._num_kept

    def forget(self, blocks: Sequence[int]) -> None:
        """Forgets blocks whose contents are gone."""
        noted: dict[int, Any]
        for noted in (self._others, self._rounds, self._kept_until):
            if noted and not noted.keys().isdisjoint(blocks):
                for block in blocks:
                    noted.pop(block, None)


def _level(num_others: int) -> int:
    if num_others < 3:
        return 1 if num_others else 0
    return 2 if num_others < 7 else 3
