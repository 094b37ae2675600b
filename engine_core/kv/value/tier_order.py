"""Orders in which a tier behind the device evicts its blocks.

A block that is read, or whose sequence is being saved, is held and stays. Knows hashes and turns;
knows no slots, files or copies.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from .turn import UNKNOWN, Turn


@dataclass(frozen=True, slots=True)
class GivenBack:
    """How blocks of a chain were given back that a tier may keep."""

    turn: Turn = UNKNOWN
    start: int = 0
    """Index of the first block in its chain."""
    is_move: bool = False
    """Whether a transfer, not a turn, held them."""


NO_TURN = GivenBack()


class TierOrder(Protocol):
    """Hashes are given from the first block of a chain to the last."""

    def fill(self, hashes: Sequence[bytes], indexes: Iterable[int]) -> None:
        """Adds blocks that are being saved, with one hold each. `indexes`: theirs in their
        chain."""

    def add_oldest(self, block_hash: bytes, parent: bytes) -> None:
        """Adds a block of an earlier run, which is evicted before all others."""

    def hold(self, hashes: Sequence[bytes], *, is_move: bool) -> None:
        """Holds blocks. `is_move`: for no turn, as to lend them."""

    def let_go(self, hashes: Sequence[bytes], given: GivenBack | None = None) -> None:
        """Ends one hold of each of these blocks, some of which may be dropped already. `given`: how
        the device's blocks were given back; None: they were read for a transfer."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Notes that blocks were loaded."""

    def take(self, count: int) -> list[bytes]:
        """Chooses `count` blocks to evict, or as many as nothing holds, and removes them from the
        order. Returns their hashes."""

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Removes blocks that are lost, held or not."""


class RecencyOrder:
    """See `TierOrder`. The least recently used block goes first, of a chain the last one."""

    def __init__(self) -> None:
        self._blocks = OrderedDict[bytes, None]()
        """The least recently used first. A dict would be searched past every entry that left its
        front."""
        self._num_holds = Counter[bytes]()

    def fill(self, hashes: Sequence[bytes], indexes: Iterable[int]) -> None:
        self._blocks.update(dict.fromkeys(hashes))
        self._num_holds.update(hashes)

    def add_oldest(self, block_hash: bytes, parent: bytes) -> None:
        self._blocks[block_hash] = None
        self._blocks.move_to_end(block_hash, last=False)

    def hold(self, hashes: Sequence[bytes], *, is_move: bool) -> None:
        self._num_holds.update(hashes)

    def let_go(self, hashes: Sequence[bytes], given: GivenBack | None = None) -> None:
        end_holds(self._num_holds, hashes)
        if given is not None:
            self.touch(hashes)

    def touch(self, hashes: Sequence[bytes]) -> None:
        blocks = self._blocks
        for block_hash in reversed(hashes):
            if block_hash in blocks:
                blocks.move_to_end(block_hash)

    def take(self, count: int) -> list[bytes]:
        holds = self._num_holds
        unheld = (each for each in self._blocks if each not in holds) if holds else self._blocks
        taken = list(islice(unheld, count))
        self.drop(taken)
        return taken

    def drop(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)


def end_holds(num_holds: Counter[bytes], hashes: Sequence[bytes]) -> list[bytes]:
    """Ends one hold of each of these; returns those that have none any more."""
    unheld = []
    for block_hash in hashes:
        if left := num_holds.pop(block_hash) - 1:
            num_holds[block_hash] = left
        else:
            unheld.append(block_hash)
    return unheld
