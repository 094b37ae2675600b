"""The choice of the stay whose next block is worth least.

The value of a block is the returns a second that its memory brings (`ReturnTimes`), times the time
in which it is computed again. Of a ring only the oldest and the newest stay are compared with
others.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from itertools import count

from .recompute import RecomputeCosts
from .return_times import bucket_of
from .rings import Rings
from .stays import Ring, Stay, set_fractions

ACTIVE_SECONDS = 600.0
"""Time after its last turn in which a tenant has a share of the cache."""
REVIEW_EVERY = 128
"""Victims after which all classes are compared again, at least."""
VICTIMS_PER_CANDIDATE = 4
"""Victims until the next review for each candidate of one, at least, so that many classes do not
make each victim dear."""
REVIEW_SECONDS = 1.0
YOUNG_SECONDS = 1.0
"""Least expected stay of a block, where nothing evicts it."""
KEPT_RATE = 1000.0
"""Returns a second of blocks that a hint keeps."""
WORTH_LESS = 1.02
"""Factor by which the value of a stay may rise after it was compared with others."""
_Candidate = tuple[float, int, Ring, bool]
"""Value, number, ring, and whether it is the newest stay of the ring."""


class Victims:
    def __init__(
        self, rings: Rings, costs: RecomputeCosts, note_lost: Callable[[Stay], None]
    ) -> None:
        """`note_lost` is called before an observed stay loses its last block."""
        self._rings = rings
        self._note_lost = note_lost
        self._costs = costs
        self._candidates: list[_Candidate] = []
        """The least one first."""
        self._begun: Stay | None = None
        """The stay that is being evicted, until it is empty or the next comparison."""
        self._numbers = count()
        self._num_until_review = 0
        self._next_review = 0.0

    def take(self, now: float, count: int) -> list[int]:
        """Takes so many blocks of the least values out of their rings; there have to be as many."""
        if now >= self._next_review:
            self._review(now)
        rings = self._rings
        taken: list[int] = []
        while wanted := count - len(taken):
            stay = self._begun
            # A stay that is partly evicted is evicted completely: its first blocks have less value.
            if stay is None or not stay.blocks:
                stay = self._begun = self._least(now)
            num_spare = stay.ring.share.num_spare(rings.num_blocks)
            if num_spare < 0:
                self._begun = None
                continue
            if stay.is_observed:
                self._note_lost(stay)
            blocks = rings.take_last(stay, min(wanted, num_spare or 1))
            self._num_until_review -= len(blocks)
            taken += blocks
        return taken

    def cost(self, now: float) -> float:
        """Expected cost of evicting the block of least value, in units of computing the first block
        of a chain: the probability that it returns within as long a time again as it has stayed,
        times the cost to compute it."""
        stay = self._least(now)
        age = max(now - stay.began, YOUNG_SECONDS)
        cost = self._cost(stay)
        return min(cost, self._value(stay, now) * age)

    def _least(self, now: float) -> Stay:
        """The stay with the least value."""
        num_blocks = self._rings.num_blocks
        while True:
            if not self._candidates or self._num_until_review <= 0:
                self._review(now)
            value, _, ring, is_newest = self._candidates[0]
            if ring.share.num_spare(num_blocks) < 0:
                heappop(self._candidates)
                continue
            if (stay := ring.end(is_newest=is_newest)) is None:
                heappop(self._candidates)
                continue
            found = self._value(stay, now)
            if found <= value * WORTH_LESS:
                return stay
            heapreplace(self._candidates, (found, next(self._numbers), ring, is_newest))

    def _review(self, now: float) -> None:
        """Compares all classes of tenants that have their shares or more."""
        rings = self._rings
        self._begun = None
        rings.drop_left(now - ACTIVE_SECONDS)
        shares = rings.shares.values()
        set_fractions(shares, now, ACTIVE_SECONDS)
        self._candidates = [
            (self._value(stay, now), next(self._numbers), ring, is_newest)
            for share in shares
            if share.num_spare(rings.num_blocks) >= 0
            for ring in share.rings.values()
            for is_newest in (False, True)
            if (stay := ring.end(is_newest=is_newest)) is not None
        ]
        heapify(self._candidates)
        assert self._candidates
        self._num_until_review = max(REVIEW_EVERY, VICTIMS_PER_CANDIDATE * len(self._candidates))
        self._next_review = now + REVIEW_SECONDS

    def _value(self, stay: Stay, now: float) -> float:
        """Time that is saved by a second of a block's memory.

        It is that of the whole stay, not of its last block: the last block takes longest to compute
        and has to go first, so that one which is worth more than others would keep blocks before
        it that are worth less.
        """
        ring = stay.ring
        rate = ring.times.rates[bucket_of(now - stay.began)]
        if stay.kept_until > now:
            rate = KEPT_RATE
        return rate * ring.factor * self._cost(stay)

    def _cost(self, stay: Stay) -> float:
        """Time to compute a block of a stay, on average."""
        return self._costs.of(stay.depth - len(stay.blocks) / 2)
