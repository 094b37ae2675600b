"""Replays a trace against a cache alone: blocks and an order of eviction, without an engine.

Requests are served one after another in order of time; a request takes the time of the tokens that
it does not find. Knows the engine's block pool, and Belady's order, which knows the future.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.return_times import (
    ReturnClasses,
    ReturnTimes,
    Sample,
    rates_of,
)
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn

from .agent_sessions import BLOCK, AgentRecord
from .trace_file import TraceRecord

FloatArray = npt.NDArray[np.float64]
NEVER = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Time of a prompt's tokens: those of an 8B model on an H200."""

    seconds_per_token: float = 1 / 24_000
    pivot_tokens: int = 48_000
    """Position at which attention takes as long as all else."""

    def seconds(self, start: int, end: int) -> float:
        """Seconds of tokens `start` up to `end` of a prompt."""
        mean_position = (start + end) / 2
        return (end - start) * self.seconds_per_token * (1 + mean_position / self.pivot_tokens)

    @property
    def costs(self) -> RecomputeCosts:
        return RecomputeCosts(self.pivot_tokens / BLOCK)


class Cache(Protocol):
    """A cache of blocks under an order of eviction."""

    def serve(self, hash_ids: Sequence[int], now: float, turn: Turn) -> int:
        """Serves a prompt with these full blocks; returns how many of them are hits."""


class PoolCache:
    """The engine's block pool. Nothing is held from one request to the next."""

    def __init__(
        self,
        num_blocks: int,
        costs: RecomputeCosts | None,
        times: ReturnClasses | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, costs, times)

    def serve(self, hash_ids: Sequence[int], now: float, turn: Turn) -> int:
        pool = self.pool
        pool.note_time(now)
        # A prompt longer than the memory is computed in windows of it, and cached up to there.
        hashes = [hash_id.to_bytes(16) for hash_id in hash_ids[: pool.num_usable]]
        hits = pool.find_leading(hashes)
        pool.share(hits)
        added = pool.allocate(len(hashes) - len(hits))
        for block, block_hash in zip(added, hashes[len(hits) :], strict=True):
            pool.cache(block, block_hash)
        pool.release(hits + added, turn=turn)
        return len(hits)


class BeladyCache:
    """Evicts the block whose next use is farthest ahead. A prompt that uses a block uses all before
    it, so the last block of a chain is evicted first."""

    def __init__(self, num_blocks: int, trace: Sequence[Sequence[int]]) -> None:
        self._num_blocks = num_blocks
        num_ids = 1 + max(max(ids, default=0) for ids in trace)
        self._uses: list[list[int]] = [[] for _ in range(num_ids)]
        for number, ids in reversed(list(enumerate(trace))):
            for hash_id in ids:
                self._uses[hash_id].append(number)
        self._cached: dict[int, int] = {}
        """Next use by block."""
        self._farthest: list[tuple[int, int, int]] = []
        """Candidates: the negated next use, the negated depth, and the block."""

    def serve(self, hash_ids: Sequence[int], now: float, turn: Turn) -> int:
        hash_ids = hash_ids[: self._num_blocks]
        num_hits = 0
        cached = self._cached
        for hash_id in hash_ids:
            if hash_id not in cached:
                break
            num_hits += 1
        for depth, hash_id in enumerate(hash_ids):
            uses = self._uses[hash_id]
            uses.pop()
            cached[hash_id] = uses[-1] if uses else NEVER
            heapq.heappush(self._farthest, (-cached[hash_id], -depth, hash_id))
        while len(cached) > self._num_blocks:
            negated, _, hash_id = heapq.heappop(self._farthest)
            if cached.get(hash_id) == -negated:
                del cached[hash_id]
        return num_hits


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Hits and work of a trace on a cache."""

    num_tokens: int = 0
    num_hit_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """[requests] seconds from the start."""
    prefills: list[float] = field(default_factory=list)
    """[requests] seconds in which a prompt is computed."""

    @property
    def hit_share(self) -> float:
        return self.num_hit_tokens / self.num_tokens

    @property
    def load(self) -> float:
        """Share of the time in which one server computes prompts; above 1 it does not keep up."""
        return sum(self.prefills) / (self.arrivals[-1] - self.arrivals[0])

    def first_token_seconds(self, speed: float = 1.0, aging: float | None = None) -> FloatArray:
        """[requests] seconds from the arrival to the first token, where one server computes prompts
        one after another, so many times as fast: in order of arrival or, with `aging`, the shortest
        first, where a second of waiting outweighs so many of work."""
        free_at = 0.0
        waiting: list[tuple[float, int]] = []
        found = np.zeros(len(self.arrivals))
        following = deque(enumerate(self.arrivals))
        while following or waiting:
            if not waiting:
                free_at = max(free_at, following[0][1])
            while following and following[0][1] <= free_at:
                number, arrival = following.popleft()
                work = self.prefills[number] / speed
                heapq.heappush(
                    waiting, (arrival if aging is None else work + aging * arrival, number)
                )
            number = heapq.heappop(waiting)[1]
            free_at += self.prefills[number] / speed
            found[number] = free_at - self.arrivals[number]
        return found


def replay(
    records: Sequence[TraceRecord],
    cache: Cache,
    prefill: Prefill,
    turn_of: Callable[[TraceRecord], Turn],
) -> Replayed:
    """Serves the requests in order of time."""
    found = Replayed()
    for record in records:
        now = record.timestamp / 1000
        num_hits = cache.serve(full_blocks(record), now, turn_of(record))
        # The last token is always computed.
        num_cached = min(num_hits * BLOCK, record.input_length - 1)
        found.num_tokens += record.input_length
        found.num_hit_tokens += num_cached
        found.arrivals.append(now)
        found.prefills.append(prefill.seconds(num_cached, record.input_length))
    return found


def full_blocks(record: TraceRecord) -> list[int]:
    """Blocks of a prompt that can be cached."""
    return record.hash_ids[: record.input_length // BLOCK]


def turn_of(record: TraceRecord) -> Turn:
    """The turn as an engine knows it: its tenant, and what its answer waits for."""
    if isinstance(record, AgentRecord):
        return Turn(tenant=record.tenant, kind=record.kind)
    return UNKNOWN


class KnownTimes(ReturnClasses):
    """Return times that are counted first, over all stays, and then known."""

    def __init__(self) -> None:
        super().__init__()
        self.is_known = False

    def _new(self, parent: ReturnTimes | None) -> ReturnTimes:
        return _Counted(self, parent)

    def settle(self, now: float) -> None:
        """Ends the observation of all stays."""
        for times in self._times.values():
            assert isinstance(times, _Counted)
            times.settle(now)

    def freeze(self) -> None:
        self.is_known = True
        # General classes come before the narrower ones, which are derived from them.
        for key in sorted(self._times, key=len):
            times = self._times[key]
            assert isinstance(times, _Counted)
            times.count()


class _Counted(ReturnTimes):
    """Return times of a class without a bound of their number."""

    def __init__(self, classes: KnownTimes, parent: ReturnTimes | None) -> None:
        super().__init__(parent)
        self._classes = classes
        self._samples = [deque[Sample]()]
        if classes.is_known and parent is not None:
            self.hazards = parent.hazards
            self.rates = parent.rates

    def begin(self, stay: Sample) -> bool:
        if self._classes.is_known:
            return False
        self._count_in(stay)
        return True

    def _count_in(self, stay: Sample) -> None:
        self._samples[0].append(stay)
        if isinstance(self._parent, _Counted):
            self._parent._count_in(stay)

    def settle(self, now: float) -> None:
        for stay in self._samples[0]:
            stay.end(now, has_returned=False)

    def count(self) -> None:
        self.hazards = self._learnt(0.0)
        self.rates = rates_of(self.hazards)


def known_times(costs: RecomputeCosts, others: Iterable[Sequence[AgentRecord]]) -> KnownTimes:
    """The return times of a load, counted over other draws of it, each with memory for all blocks,
    and apart for sub-agents. A cache with them knows the distributions
    and not the draws that it is measured by."""
    known = KnownTimes()
    for records in others:
        num_all = len({hash_id for record in records for hash_id in record.hash_ids})
        cache = PoolCache(num_all, costs, known)
        for record in records:
            cache.serve(full_blocks(record), record.timestamp / 1000, turn_and_agent_of(record))
        known.settle(records[-1].timestamp / 1000)
    known.freeze()
    return known


def turn_and_agent_of(record: TraceRecord) -> Turn:
    """Like `turn_of`, with whether the turn is a sub-agent's."""
    assert isinstance(record, AgentRecord)
    who = "sub-agent" if "." in record.session else "agent"
    return Turn(tenant=record.tenant, kind=f"{record.kind} of {who}")
