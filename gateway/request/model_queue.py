"""The queue of one model: entries in the order of the policies of their tiers.

Where a policy compares all requests, they are in one heap. Otherwise each tenant has a heap, and
tenants take turns by their virtual times. Knows nothing about turns and replicas.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from headwater.services.runtime.queue_policy import (
    DEFAULT,
    PROMOTION_SECONDS,
    Arrival,
    Due,
    Facts,
    FirstComeFirstServed,
    Policies,
    Policy,
    TenantTurns,
)

RISE_SECONDS = 30.0
Rank = tuple[int, float, int]
ALL_TENANTS = ""


class Terms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Facts about a request that policies use."""

    arrived_at: float | None = None
    """Time of arrival on the queue's clock; None: the request enters the queue now."""
    num_answer_tokens: float = 0.0
    """Predicted length of its answer."""
    num_blocks: int = 0
    """KV blocks that it will need."""
    cost: float = 0.0
    """Cost of the request in its tenant's virtual time."""
    first_token_by: float = math.inf
    """Time by which the first token is due."""


NO_TERMS = Terms()


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A request in the queue."""

    tier: int
    virtual_time: float
    arrival: int
    since: float
    tenant: str
    num_tokens: int
    num_choices: int
    terms: Terms
    turn: asyncio.Future[None]
    place: Arrival
    """Place of the request in order of arrival."""
    fcfs_seconds: float = 0.0
    """How long it would have waited in order of arrival; set when it leaves the queue."""

    def tier_at(self, now: float) -> int:
        """A request that waits long rises a tier at a time."""
        return max(0, self.tier - int((now - self.since) / RISE_SECONDS))

    def facts(self, now: float, seconds_per_token: float) -> Facts:
        is_promoted = now - self.since >= PROMOTION_SECONDS
        arrived_at = self.terms.arrived_at
        return Facts(
            arrived_at=self.since if arrived_at is None else arrived_at,
            virtual_time=self.virtual_time,
            num_prompt_tokens=self.num_tokens,
            num_answer_tokens=self.terms.num_answer_tokens,
            num_level=0 if is_promoted else self.num_tokens,
            seconds_per_token=seconds_per_token,
            first_token_by=self.terms.first_token_by,
        )


Entry = tuple[Rank, Waiting]


@dataclass(slots=True, eq=False)
class ModelQueue:
    """Heaps of waiting entries. An entry that left stays in its heap, with a turn that is done."""

    clock: Callable[[], float]
    policies: Policies = field(default_factory=lambda: Policies.of(DEFAULT))
    seconds_per_token: Callable[[], float] = field(default=lambda: 0.0)
    """Time in which replicas compute a prompt token; 0 where it is not known."""
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_released_tokens: int = 0
    """Number of tokens of prompts that have a turn and are not at a replica yet."""
    num_released_blocks: int = 0
    unstarted: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of prompts, by tenant, that have a turn and wait to be computed, here or at a
    replica."""
    _heaps: dict[str, list[Entry]] = field(default_factory=dict)
    _turns: TenantTurns = field(default_factory=TenantTurns)
    _first_come: FirstComeFirstServed = field(default_factory=FirstComeFirstServed)

    def policy_of(self, waiting: Waiting, now: float) -> Policy:
        return self.policies.of_tier(waiting.tier_at(now))

    def place(self, num_tokens: int) -> Arrival:
        """The place of a newcomer in order of arrival."""
        return self._first_come.enter(num_tokens, self.clock())

    def push(self, waiting: Waiting) -> None:
        self.num_waiting += 1
        self.num_waiting_tokens += waiting.num_tokens
        self._turns.enter(waiting.tenant, waiting.virtual_time, waiting.terms.cost)
        self._push(waiting, self.clock(), self.seconds_per_token())

    def remove(self, entry: Entry) -> None:
        """Removes an entry whose turn has come; `left` has to be called after it."""
        for heap in self._heaps.values():
            if heap and heap[0] is entry:
                heapq.heappop(heap)
                return
            if entry in heap:
                heap.remove(entry)
                heapq.heapify(heap)
                return

    def left(self, waiting: Waiting) -> None:
        """Takes an entry out of the counts."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= waiting.num_tokens
        self._turns.leave(waiting.tenant, waiting.terms.cost)
        waiting.fcfs_seconds = self._first_come.leave(
            waiting.place, self.clock(), self.seconds_per_token()
        )

    def rank_again(self, now: float) -> None:
        """Ranks all entries by what is known now."""
        alive = list(self.entries())
        seconds_per_token = self.seconds_per_token()
        self._heaps.clear()
        for _, waiting in alive:
            self._push(waiting, now, seconds_per_token)

    def first(self) -> Entry | None:
        """The entry whose turn is next."""
        return min(self._heads(), key=self.turn, default=None)

    def first_of_others(self, tenant: str) -> Entry | None:
        """The entry of another tenant that is next in the queue."""
        others = (each for each in self.entries() if each[1].tenant != tenant)
        return min(others, key=self.turn, default=None)

    def entries(self) -> Iterator[Entry]:
        """Entries that have not left."""
        for heap in self._heaps.values():
            yield from (entry for entry in heap if not entry[1].turn.done())

    def dues(self, now: float) -> Iterator[tuple[Due, Waiting]]:
        """Entries in the order of their ranks, with the times at which their first tokens are
        due."""
        seconds_per_token = self.seconds_per_token()
        for _, waiting in sorted(self.entries()):
            by = waiting.terms.first_token_by
            may_be_refused = by < math.inf and self.policy_of(waiting, now).refuses
            yield Due(by, waiting.num_tokens * seconds_per_token, may_be_refused), waiting

    def turn(self, entry: Entry) -> tuple[int, float, Rank]:
        """Sort key of turns: the tier, the virtual time and the rank. Where ranks of tenants are
        compared, the rank alone decides."""
        rank, waiting = entry
        if self.policies.of_tier(rank[0]).orders_tenants:
            return rank[0], rank[1], rank
        return rank[0], self._turns.virtual_time(waiting.tenant), rank

    def _heads(self) -> Iterator[Entry]:
        for heap in self._heaps.values():
            while heap and heap[0][1].turn.done():
                heapq.heappop(heap)
            if heap:
                yield heap[0]

    def _push(self, waiting: Waiting, now: float, seconds_per_token: float) -> None:
        policy = self.policy_of(waiting, now)
        tier = self.policies.tier(waiting.tier_at(now))
        key = policy.key(waiting.facts(now, seconds_per_token))
        group = ALL_TENANTS if policy.orders_tenants else waiting.tenant
        heapq.heappush(self._heaps.setdefault(group, []), ((tier, key, waiting.arrival), waiting))
