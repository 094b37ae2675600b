"""Return times of blocks, learnt: how soon the next turn comes that continues a cached chain.

Times are counted in buckets that grow by half an octave. Knows times; knows no blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_BUCKETS = 32
SMALLEST_SECONDS = 0.25
EDGES = [SMALLEST_SECONDS * (2 ** (idx / 2) - 1) for idx in range(NUM_BUCKETS + 1)]
"""Seconds at which buckets begin and end: 0, 0.1, 0.25, … 16,384."""
_LATER_EDGES = EDGES[1:-1]
"""Seconds at which the second and later buckets begin."""
_PER_SECOND = 1 / SMALLEST_SECONDS
_BUCKETS_PER_LOG2 = 2.0
NUM_RECENT = 512
"""Most stays in a sample."""
STRIDES = (1, 8, 64)
"""A sample takes every n-th stay. The last one spans a long time, so that long return times are
seen where stays are many."""
REFRESH_EVERY = 256
"""Most stays after which values are computed again."""
PARENT_REFRESH_EVERY = 1024
"""Most stays between two updates of a wider class, from which many narrower ones compute their
values."""
REFRESH_SECONDS = 1.0
"""Least time between two computations. Of more than `REFRESH_EVERY` stays in this time, the class
learns from the first, so that thousands of stays a second cost little."""
PRIOR_HAZARD = 0.12
"""Chance of a return in a bucket that a stay reaches, where nothing is known: the same in all
buckets, so that the value decreases with time and the oldest block is evicted first, as with
LRU."""
PRIOR_WEIGHT = 8.0
"""Weight of the prior, in stays, relative to the stays of the class."""
FEW_STAYS = 64
FEW_RETURNS = 4
"""Fewest stays, and fewest returns, for which a class has return times of its own. With fewer, only
beginnings of stays are observed, so the newest would seem to have the least value."""
LEAST_HAZARD = 1e-6
MOST_HAZARD = 0.99
NEVER = math.inf


def bucket_of(seconds: float) -> int:
    """The bucket of an age."""
    return bisect_right(_LATER_EDGES, seconds)


class Sample:
    """Observation of one stay in the cache."""

    __slots__ = ("began", "ended", "has_returned")

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended = NEVER
        """Time of the return, or of the moment from which on it was not observed."""
        self.has_returned = False

    def end(self, now: float, *, has_returned: bool) -> None:
        if self.ended == NEVER:
            self.ended = now
            self.has_returned = has_returned


class ReturnTimes:
    """Return times of one class of turns."""

    def __init__(self, parent: ReturnTimes | None = None) -> None:
        """`parent`: the wider class, which is used where this one has few stays."""
        self._parent = parent
        self._samples = [deque[Sample](maxlen=NUM_RECENT) for _ in STRIDES]
        self._num_begun = 0
        self._begun = list[Sample]()
        """Stays since the last refresh, when they are added to samples and wider classes: noting a
        stay costs only an append."""
        self._num_until_refresh = 1
        self._next_refresh = -NEVER
        self._num_until_learnt = 0
        """Stays of narrower classes until the hazards are computed again."""
        self.rates = PRIOR_RATES
        """Returns a second of cache by bucket of a stay's age; see `rates_of`."""
        self.hazards = PRIOR_HAZARDS
        """Chance of a return within a bucket for stays that reach it, by bucket."""

    def begin(self, stay: Sample) -> bool:
        """Notes a stay that begins now. Returns whether the class learns from it."""
        begun = self._begun
        if len(begun) >= REFRESH_EVERY and stay.began < self._next_refresh:
            return False
        begun.append(stay)
        if len(begun) >= self._num_until_refresh and stay.began >= self._next_refresh:
            self._refresh(stay.began)
        return True

    def _refresh(self, now: float) -> None:
        begun = self._begun
        self._begun = []
        self._take(begun)
        self._num_until_refresh = min(REFRESH_EVERY, self._num_begun)
        self._next_refresh = now + REFRESH_SECONDS
        if self._parent is not None:
            self._parent._note(begun, now)
        self.hazards = self._learnt(now)
        self.rates = PRIOR_RATES if self.hazards is PRIOR_HAZARDS else rates_of(self.hazards)

    def _note(self, begun: Sequence[Sample], now: float) -> None:
        """Notes stays of a narrower class."""
        self._take(begun)
        if self._parent is not None:
            self._parent._note(begun, now)
        self._num_until_learnt -= len(begun)
        if self._num_until_learnt <= 0:
            self._num_until_learnt = min(PARENT_REFRESH_EVERY, self._num_begun)
            self.hazards = self._learnt(now)

    def _take(self, begun: Sequence[Sample]) -> None:
        """Adds stays to the samples, every n-th of them by the sample's stride."""
        for stride, sample in zip(STRIDES, self._samples, strict=True):
            sample.extend(begun[-self._num_begun % stride :: stride])
        self._num_begun += len(begun)

    def _learnt(self, now: float) -> Sequence[float]:
        """Hazards by the samples (Kaplan-Meier): a stay counts in each bucket that it was observed
        to pass, or to return in. With few samples they are the wider class's."""
        prior = PRIOR_HAZARDS if self._parent is None else self._parent.hazards
        stays = [stay for sample in self._samples for stay in sample]
        num_returns = sum(stay.has_returned for stay in stays)
        if self._num_begun < FEW_STAYS and num_returns < FEW_RETURNS:
            return prior
        began = np.array([stay.began for stay in stays])
        ended = np.array([stay.ended for stay in stays])
        has_returned = np.array([stay.has_returned for stay in stays])
        # What has not ended is observed up to now.
        buckets = buckets_of(np.where(ended == NEVER, now, ended) - began)
        returns = np.bincount(buckets[has_returned], minlength=NUM_BUCKETS)
        censored = np.bincount(buckets[~has_returned], minlength=NUM_BUCKETS)
        at_end = np.cumsum((returns + censored)[::-1])[::-1]
        # Stays whose observation ends in the bucket count as half.
        at_risk = np.maximum(at_end - censored / 2, 0.0)
        expected = _smooth(returns) + PRIOR_WEIGHT * np.array(prior)
        hazards: list[float] = (expected / (_smooth(at_risk) + PRIOR_WEIGHT)).tolist()
        return hazards


class ReturnClasses:
    """Return times by class, most general part first: the wider class of each class lacks its last
    part."""

    def __init__(self) -> None:
        self._times: dict[tuple[object, ...], ReturnTimes] = {}

    def of(self, key: tuple[object, ...]) -> ReturnTimes:
        if (times := self._times.get(key)) is None:
            parent = self.of(key[:-1]) if key else None
            times = self._times[key] = self._new(parent)
        return times

    def drop(self, first_parts: Collection[object]) -> None:
        """Forgets the classes that begin with one of these parts."""
        self._times = {
            key: times for key, times in self._times.items() if not key or key[0] not in first_parts
        }

    def _new(self, parent: ReturnTimes | None) -> ReturnTimes:
        return ReturnTimes(parent)


def buckets_of(seconds: FloatArray) -> npt.NDArray[np.int64]:
    """The bucket of each age."""
    logs = np.log2(_PER_SECOND * np.maximum(seconds, 0.0) + 1)
    return np.minimum((_BUCKETS_PER_LOG2 * logs).astype(np.int64), NUM_BUCKETS - 1)


def _smooth(counts: npt.NDArray[np.floating | np.integer]) -> FloatArray:
    """Means of each count and its neighbours, the count itself weighing half."""
    padded = np.concatenate((counts[:1], counts, counts[-1:])).astype(np.float64)
    smooth: FloatArray = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return smooth


def rates_of(hazards: Sequence[float]) -> list[float]:
    """By bucket of an age, the returns a second that the memory of a block brings if the block
    stays for the best time from then on: P(return within the stay) ÷ expected length of the stay,
    which a return ends. It is the index by which bandits with a known distribution are ranked
    (Gittins 1979).

    Seconds and returns up to the end of each bucket are points of a curve; the index is the
    steepest line from a bucket's beginning to a later point, an edge of the hull above the curve.
    """
    reach = 1.0
    points = [(0.0, 0.0)]
    seconds, returned = points[0]
    bounded = (min(max(hazard, LEAST_HAZARD), MOST_HAZARD) for hazard in hazards)
    for hazard, start, end in zip(bounded, EDGES, EDGES[1:], strict=False):
        # The mean time in a bucket whose rate is constant.
        seconds += reach * (end - start) * hazard / -math.log1p(-hazard)
        returned += reach * hazard
        reach *= 1 - hazard
        points.append((seconds, returned))
    rates = [0.0] * NUM_BUCKETS
    hull = [points[-1]]
    for bucket in reversed(range(NUM_BUCKETS)):
        seconds, returned = points[bucket]
        while len(hull) > 1 and _slope(points[bucket], hull[-2]) >= _slope(
            points[bucket], hull[-1]
        ):
            hull.pop()
        rates[bucket] = _slope(points[bucket], hull[-1])
        hull.append(points[bucket])
    return rates


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - start[1]) / max(end[0] - start[0], 1e-300)


PRIOR_HAZARDS: Sequence[float] = (PRIOR_HAZARD,) * NUM_BUCKETS
PRIOR_RATES: Sequence[float] = rates_of(PRIOR_HAZARDS)
"""Rates of a class without stays of its own, as most classes of a short run are."""
