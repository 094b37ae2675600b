"""Stays of blocks in the cache: the blocks that one sequence gave back together, and the rings that
they wait in. Knows no values."""

from __future__ import annotations

from collections.abc import Iterable

from .return_times import ReturnTimes, Sample
from .turn import Turn


class Stay:
    """Blocks of one chain that nobody holds, since one moment. They lie beside one another in a
    ring, the last block of the chain first."""

    __slots__ = (
        *("depth", "is_diverged", "is_lost", "is_moved", "kept_until"),
        *("num_blocks", "num_rounds", "ring", "sample", "tail", "turn"),
    )

    def __init__(self, ring: Ring, turn: Turn, sample: Sample, depth: int) -> None:
        self.ring = ring
        self.turn = turn
        self.sample = sample
        self.num_blocks = 0
        self.num_rounds = 0
        """How often its chain has returned so far."""
        self.tail = 0
        """Last block of the stay, which is evicted first."""
        self.depth = depth
        """Index of the tail in its chain."""
        self.kept_until = 0.0
        """Time up to which a hint keeps it."""
        self.is_lost = False
        """Whether a block of it was evicted."""
        self.is_moved = False
        """Whether its blocks were held for no turn, so that its time teaches nothing."""
        self.is_diverged = False
        """Whether a chain went on from the middle of it."""


class Ring:
    """Stays of one class whose chains are about as long, in the order in which they began: a ring
    of linked blocks."""

    __slots__ = ("border", "factor", "num_blocks", "share", "times")

    def __init__(self, border: int, times: ReturnTimes, share: Share, factor: float = 1.0) -> None:
        self.border = border
        """Number of no block, which stands between the ring's ends."""
        self.times = times
        self.share = share
        self.factor = factor
        """Factor by which hints multiply the value of the ring's blocks."""
        self.num_blocks = 0


class Share:
    """A tenant's part of the blocks that nobody holds."""

    def __init__(self, now: float) -> None:
        self.weight = 1.0
        self.num_blocks = 0
        self.last_used = now
        self.rings: dict[tuple[str, int, int, int, int], Ring] = {}
        """Rings by kind of turn, class of length, rounds, priority, and bits of the seconds for
        which a hint keeps their blocks."""


def above_limit(shares: Iterable[Share], num_blocks: int, now: float, active: float) -> list[Share]:
    """Shares that have as many of `num_blocks` blocks as their weight gives them, or more. A share
    counts for `active` seconds after its tenant's last turn."""
    found = list(shares)
    if len(found) == 1:
        return found
    weights = [share.weight if now - share.last_used <= active else 0.0 for share in found]
    total = sum(weights) or 1.0
    return [
        share
        for share, weight in zip(found, weights, strict=True)
        # Rounded down: one that has exactly its share does not miss it by a rounding, so that there
        # is always one.
        if share.num_blocks and share.num_blocks >= int(num_blocks * weight / total)
    ]
