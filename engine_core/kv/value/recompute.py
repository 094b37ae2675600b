"""Time in which a block is computed again, by its place in its chain."""

from __future__ import annotations

import math

NUM_LENGTHS = 8
"""Classes of chains by length, as far as it changes the time."""


class RecomputeCosts:
    """Attention reads all tokens before a token, so that a block late in a chain takes longer."""

    def __init__(self, pivot: float = math.inf) -> None:
        """`pivot`: index of the block at which attention over the blocks before it takes as long
        as all else; infinite: that is not known, and all blocks take the same time."""
        assert pivot > 0
        self._per_block = 1 / pivot

    def of(self, depth: float) -> float:
        """Cost of the block with this index in its chain, in units of the first one's."""
        return 1.0 + depth * self._per_block

    def length_class(self, depth: int) -> int:
        """Class of chains that cost about as much: within a factor of 1.5."""
        if depth <= 0:
            return 0
        return min(int(math.log(1.0 + depth * self._per_block) * 2.47), NUM_LENGTHS - 1)
