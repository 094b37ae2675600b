"""Time to compute a block again, by its index in its chain."""

from __future__ import annotations

import math
from bisect import bisect_right

NUM_LENGTHS = 8
"""Classes of chains by length, as far as it changes the time."""
GROWTH = 1.5
"""Factor between the times of a class's longest chain and of the next one's."""


class RecomputeCosts:
    """Attention reads all tokens before a token, so that a block late in a chain takes longer."""

    def __init__(self, pivot: float = math.inf) -> None:
        """`pivot`: index of the block at which attention over the blocks before it takes as long
        as all else; infinite: that is not known, and all blocks take the same time."""
        assert pivot > 0
        self._per_block = 1 / pivot
        self._longest = [pivot * (GROWTH**number - 1) for number in range(1, NUM_LENGTHS)]
        """Indexes of last blocks up to which chains are of each class but the last."""

    def of(self, depth: float) -> float:
        """Cost of the block with this index in its chain, in units of the first one's."""
        return 1.0 + depth * self._per_block

    def length_class(self, depth: int) -> int:
        """Class of chains that cost about as much: within `GROWTH`."""
        return bisect_right(self._longest, depth)
