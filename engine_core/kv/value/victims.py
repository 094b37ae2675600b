"""The choice of the stay whose next block is worth least.

The value of a block is the returns a second that its memory brings (`ReturnTimes`), times the time
in which it is computed again. Of a ring only the oldest and the newest stay are compared with
others.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from itertools import count

from .recompute import RecomputeCosts
from .return_times import bucket_of
from .rings import Rings
from .stays import Ring, Stay, above_limit

ACTIVE_SECONDS = 600.0
"""Time after its last turn in which a tenant has a share of the cache."""
REVIEW_EVERY = 128
"""Victims after which all classes are compared again, at least."""
REVIEW_SECONDS = 1.0
CANDIDATES_PER_VICTIM = 8
"""Candidates of a review for each victim until the next one, at most, so that many classes do not
make each victim dear."""
REVIEW_PART = 256
"""Part of all blocks after which tenants are compared again: so far one falls below its share."""
KEPT_RATE = 1000.0
"""Returns a second of blocks that a hint keeps."""
WORTH_LESS = 1.02
"""Factor by which the value of a stay may have risen since it was compared with others."""
_Candidate = tuple[float, int, Ring, bool]
"""Value, number, ring, and whether it is the newest stay of the ring."""


class Victims:
    def __init__(self, rings: Rings, costs: RecomputeCosts) -> None:
        self._rings = rings
        self._costs = costs
        self._candidates: list[_Candidate] = []
        """The least one first."""
        self._numbers = count()
        self._num_until_review = 0
        self._next_review = 0.0

    def next(self, now: float) -> tuple[Stay, int]:
        """The stay that is worth least, and how many of its blocks may be taken; there has to be
        one."""
        if self._num_until_review <= 0 or now >= self._next_review:
            self._review(now)
        while True:
            if not self._candidates:
                self._review(now)
            value, _, ring, is_newest = self._candidates[0]
            stay = self._rings.end_of(ring, is_newest=is_newest)
            if stay is None:
                heappop(self._candidates)
                continue
            found = self._value(stay, now)
            if found <= value * WORTH_LESS:
                return stay, max(1, self._num_until_review)
            heapreplace(self._candidates, (found, next(self._numbers), ring, is_newest))

    def note_taken(self, num_blocks: int) -> None:
        """Notes that so many blocks were taken."""
        self._num_until_review -= num_blocks

    def _review(self, now: float) -> None:
        """Compares all classes of tenants that have their shares or more."""
        rings = self._rings
        rings.drop_left(now - ACTIVE_SECONDS)
        shares = above_limit(rings.shares.values(), rings.num_blocks, now, ACTIVE_SECONDS)
        self._candidates = [
            (self._value(stay, now), next(self._numbers), ring, is_newest)
            for share in shares
            for ring in share.rings.values()
            if ring.num_blocks
            for is_newest in (False, True)
            if (stay := rings.end_of(ring, is_newest=is_newest)) is not None
        ]
        heapify(self._candidates)
        assert self._candidates
        every = max(REVIEW_EVERY, len(self._candidates))
        if len(rings.shares) > 1:
            every = min(every, max(1, rings.num_blocks // REVIEW_PART))
            every = max(every, len(self._candidates) // CANDIDATES_PER_VICTIM)
        self._num_until_review = every
        self._next_review = now + REVIEW_SECONDS

    def _value(self, stay: Stay, now: float) -> float:
        """Time that is saved by a second of a block's memory.

        It is that of the whole stay, not of its last block: the last block takes longest to compute
        and has to go first, so that one which is worth more than others would keep blocks before
        it that are worth less.
        """
        ring = stay.ring
        rate = ring.times.rates[bucket_of(now - stay.sample.began)]
        if stay.kept_until > now:
            rate = KEPT_RATE
        return rate * ring.factor * self._costs.of(stay.depth - stay.num_blocks / 2)
