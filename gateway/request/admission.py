"""Admits choices: a bounded number runs at once, as long as the model's replicas have room for more
waiting prompts; the others wait in a bounded queue, in order of tier, virtual time and arrival.

A request that waits long rises a tier at a time, so that none starves. Knows nothing about
replicas.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.services.runtime import errors

RISE_SECONDS = 30.0
FREE_PROMPTS = 4
"""Number of prompts of each of several tenants that may wait at replicas whatever the room there: a
replica lets the tenant that is behind go first, and it can only do so for prompts that it has."""

KEPT = 16
"""The tenant that has most turns leaves one of KEPT turns to others, who then need not wait for its
answers to end."""

HasRoom = Callable[[str, int, int], bool]
"""Whether a model's replicas let one more prompt wait there. Arguments: the tokens that are on
their way there, and the number of prompts that were sent and have not started."""
Rank = tuple[int, float, int]


def anywhere(model_key: str, num_tokens: int, num_prompts: int) -> bool:
    """Always True: no bound."""
    return True


@dataclass(slots=True, eq=False)
class _Waiting:
    tier: int
    virtual_time: float
    arrival: int
    since: float
    tenant: str
    num_tokens: int
    num_choices: int
    turn: asyncio.Future[None]

    def rank(self, now: float) -> Rank:
        """Sort key of the queue; the smallest goes first."""
        risen = int((now - self.since) / RISE_SECONDS)
        return (max(0, self.tier - risen), self.virtual_time, self.arrival)


Entry = tuple[Rank, _Waiting]


@dataclass(slots=True, eq=False)
class _ModelQueue:
    """The queue of one model."""

    queue: list[Entry] = field(default_factory=list)
    """Heap of waiting entries. An entry that left stays in it, with a turn that is done."""
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_released_tokens: int = 0
    """Number of tokens of prompts that have a turn and are not at a replica yet."""
    unstarted: Counter[str] = field(default_factory=Counter)
    """Number of prompts, by tenant, that have a turn and wait to be computed, here or at a
    replica."""


class Turn:
    """The right of one choice, or of several that run together, to run. A context manager that
    gives it back."""

    def __init__(
        self,
        admission: Admission,
        model_queue: _ModelQueue,
        tenant: str,
        num_tokens: int,
        num_choices: int,
    ) -> None:
        self._admission = admission
        self._model_queue = model_queue
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._num_choices = num_choices
        self._is_started = self._is_over = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def sent(self) -> None:
        """Notes that the prompt is on its way to a replica, or will never be."""
        self._model_queue.num_released_tokens -= self._num_tokens
        self._num_tokens = 0

    def started(self) -> None:
        """Notes that the prompt is being computed, or will never be."""
        self.sent()
        if not self._is_started:
            self._is_started = True
            self._model_queue.unstarted[self._tenant] -= 1
            if not self._model_queue.unstarted[self._tenant]:
                del self._model_queue.unstarted[self._tenant]
            # There may be room for the next prompt now.
            self._admission.give()

    def release(self) -> None:
        """Gives the turn back. Calling it again does nothing."""
        if not self._is_over:
            self._is_over = True
            self.started()
            self._admission.released(self._tenant, self._num_choices)


class Admission:
    """Gives turns: lowest tier first, then the tenant that was given least, then first come. A full
    queue refuses."""

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        has_room: HasRoom = anywhere,
    ) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self._num_kept = max_running // KEPT
        self.num_running = 0
        self.num_queued = 0
        self.someone_waits = asyncio.Event()
        self._has_room = has_room
        self._queues: defaultdict[str, _ModelQueue] = defaultdict(_ModelQueue)
        self._clock = clock
        self._ranked_at = clock()
        self.queued_by_tier: Counter[int] = Counter()
        self._queued_by_tenant: Counter[str] = Counter()
        self._running_by_tenant: Counter[str] = Counter()
        self._arrivals = itertools.count()

    async def take(
        self,
        tier: int,
        virtual_time: float = 0.0,
        model_key: str = "",
        tenant: str = "",
        num_tokens: int = 0,
        num_choices: int = 1,
    ) -> Turn:
        """Waits for a turn for `num_choices` that run together, with a prompt of `num_tokens`.
        Raises `LimitExceeded` when the queue is full and no other tenant has more in it, or when
        this entry has to make room there."""
        model_queue = self._queues[model_key]
        num_choices = min(num_choices, self.max_running)
        if not self._may_pass(model_key, model_queue, tenant, num_choices):
            await self._wait(tier, virtual_time, model_queue, tenant, num_tokens, num_choices)
        else:
            self._take(model_queue, tenant, num_tokens, num_choices)
        return Turn(self, model_queue, tenant, num_tokens, num_choices)

    def try_take(self, model_key: str, tenant: str) -> Turn | None:
        """Returns a turn for one more choice of a prompt that has one already; None where it would
        have to wait."""
        model_queue = self._queues[model_key]
        if not self._may_pass(model_key, model_queue, tenant, 1):
            return None
        self._take(model_queue, tenant, 0, 1)
        return Turn(self, model_queue, tenant, 0, 1)

    def reject_early(self, tenant: str) -> None:
        """Raises `LimitExceeded` where the queue is full and no other tenant has more in it."""
        if (
            self.num_queued
            and self.num_queued >= self.max_queued
            and self._greediest(tenant) == tenant
        ):
            raise self._is_full()

    def by_tenant(self) -> dict[str, tuple[int, int]]:
        """Choices that run and prompts that wait, by tenant's key; of tenants that have any."""
        keys = self._running_by_tenant.keys() | self._queued_by_tenant.keys()
        return {key: (self._running_by_tenant[key], self._queued_by_tenant[key]) for key in keys}

    def waiting_tokens(self, model_key: str) -> int:
        """Number of tokens of the prompts that wait here."""
        return self._queues[model_key].num_waiting_tokens

    def give(self) -> None:
        """Gives turns to waiting entries as long as there are some. To be called when turns may
        have become free."""
        if not self.num_queued:
            self.someone_waits.clear()
            return
        self._rank_again()
        while (found := self._next()) is not None:
            model_queue, entry = found
            if entry is model_queue.queue[0]:
                heapq.heappop(model_queue.queue)
            else:
                model_queue.queue.remove(entry)
                heapq.heapify(model_queue.queue)
            waiting = entry[1]
            self._left(model_queue, waiting)
            self._take(model_queue, waiting.tenant, waiting.num_tokens, waiting.num_choices)
            waiting.turn.set_result(None)

    def released(self, tenant: str, num_choices: int) -> None:
        """Notes that `num_choices` no longer run."""
        self.num_running -= num_choices
        self._running_by_tenant[tenant] -= num_choices
        if not self._running_by_tenant[tenant]:
            del self._running_by_tenant[tenant]
        self.give()

    async def _wait(
        self,
        tier: int,
        virtual_time: float,
        model_queue: _ModelQueue,
        tenant: str,
        num_tokens: int,
        num_choices: int,
    ) -> None:
        if self.num_queued >= self.max_queued:
            if (greediest := self._greediest(tenant)) == tenant:
                raise self._is_full()
            self._refuse_last_of(greediest)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now = self._clock()
        waiting = _Waiting(
            tier, virtual_time, next(self._arrivals), now, tenant, num_tokens, num_choices, turn
        )
        heapq.heappush(model_queue.queue, (waiting.rank(now), waiting))
        model_queue.num_waiting += 1
        model_queue.num_waiting_tokens += num_tokens
        self.num_queued += 1
        self.queued_by_tier[tier] += 1
        self._queued_by_tenant[tenant] += 1
        self.someone_waits.set()
        self.give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._left(model_queue, waiting)
            elif turn.exception() is None:
                # A turn that was given in the same moment must not be lost.
                Turn(self, model_queue, tenant, num_tokens, num_choices).release()
            raise

    def _take(
        self, model_queue: _ModelQueue, tenant: str, num_tokens: int, num_choices: int
    ) -> None:
        self.num_running += num_choices
        self._running_by_tenant[tenant] += num_choices
        model_queue.unstarted[tenant] += 1
        model_queue.num_released_tokens += num_tokens

    def _left(self, model_queue: _ModelQueue, waiting: _Waiting) -> None:
        """Takes an entry out of the counts of its queue."""
        model_queue.num_waiting -= 1
        model_queue.num_waiting_tokens -= waiting.num_tokens
        self.num_queued -= 1
        self.queued_by_tier[waiting.tier] -= 1
        if not self.queued_by_tier[waiting.tier]:
            del self.queued_by_tier[waiting.tier]
        self._queued_by_tenant[waiting.tenant] -= 1
        if not self._queued_by_tenant[waiting.tenant]:
            del self._queued_by_tenant[waiting.tenant]

    def _greediest(self, newcomer: str) -> str:
        """Tenant with most entries in the queue; the newcomer, if one more entry gives it as
        many."""
        counts = self._queued_by_tenant
        most = max(counts, key=counts.__getitem__, default=newcomer)
        return most if counts.get(most, 0) > counts.get(newcomer, 0) + 1 else newcomer

    def _refuse_last_of(self, tenant: str) -> None:
        """Refuses the last entry of a tenant in the queue."""
        entries = [
            (rank, waiting, model_queue)
            for model_queue in self._queues.values()
            for rank, waiting in model_queue.queue
            if waiting.tenant == tenant and not waiting.turn.done()
        ]
        if not entries:
            # All of them were cancelled a moment ago and leave their places.
            return
        _, last, model_queue = max(entries, key=lambda entry: entry[0])
        last.turn.set_exception(self._is_full())
        self._left(model_queue, last)

    def _is_full(self) -> errors.LimitExceeded:
        return errors.LimitExceeded(
            f"{self.num_queued} requests are already waiting", retry_after=1.0
        )

    def _may_pass(
        self, model_key: str, model_queue: _ModelQueue, tenant: str, num_choices: int
    ) -> bool:
        """Whether a newcomer need not wait."""
        is_first = not model_queue.num_waiting and self._is_open(
            model_key, model_queue, tenant, num_choices
        )
        return is_first or self._is_free(model_queue, tenant, num_choices)

    def _has_turns(self, tenant: str, num_choices: int) -> bool:
        """Whether enough turns are left for the tenant."""
        num_left = self.max_running - self.num_running - num_choices
        return num_left >= self._num_kept or (num_left >= 0 and tenant != self._has_most())

    def _has_most(self) -> str:
        """Tenant that leaves the last turns to others; empty where no tenant has many."""
        running = self._running_by_tenant
        tenant = max(running, key=running.__getitem__, default="")
        return tenant if running.get(tenant, 0) > self._num_kept > 0 else ""

    def _is_open(
        self, model_key: str, model_queue: _ModelQueue, tenant: str, num_choices: int
    ) -> bool:
        return self._has_turns(tenant, num_choices) and self._has_room_for(model_key, model_queue)

    def _has_room_for(self, model_key: str, model_queue: _ModelQueue) -> bool:
        return self._has_room(
            model_key, model_queue.num_released_tokens, model_queue.unstarted.total()
        )

    def _is_free(self, model_queue: _ModelQueue, tenant: str, num_choices: int) -> bool:
        """Whether other tenants have taken all room and this one has next to nothing."""
        num_own = model_queue.unstarted.get(tenant, 0)
        is_next_to_nothing = num_own < FREE_PROMPTS and len(model_queue.unstarted) > (num_own > 0)
        return is_next_to_nothing and self._has_turns(tenant, num_choices)

    def _next(self) -> tuple[_ModelQueue, Entry] | None:
        """Queue and entry that go before all others that have room."""
        found = [
            (model_queue, entry)
            for key, model_queue in self._queues.items()
            if (entry := self._first(key, model_queue)) is not None
        ]
        return min(found, key=lambda each: each[1][0], default=None)

    def _first(self, model_key: str, model_queue: _ModelQueue) -> Entry | None:
        """Entry that may have the next turn. Others pass the tenant that leaves the last turns to
        them."""
        while model_queue.queue and model_queue.queue[0][1].turn.done():
            heapq.heappop(model_queue.queue)
        if not model_queue.queue or not self._has_room_for(model_key, model_queue):
            return None
        first = model_queue.queue[0]
        if self._has_turns(first[1].tenant, first[1].num_choices):
            return first
        if first[1].tenant != (has_most := self._has_most()):
            # It waits for more turns than are left, and no other one passes it meanwhile.
            return None
        others = (
            each
            for each in model_queue.queue
            if each[1].tenant != has_most and not each[1].turn.done()
        )
        second = min(others, default=None)
        return (
            second
            if second is not None and self._has_turns(second[1].tenant, second[1].num_choices)
            else None
        )

    def _rank_again(self) -> None:
        """Sorts the queues anew, once a second at most, for the entries that have risen
        meanwhile."""
        if (now := self._clock()) - self._ranked_at >= 1.0:
            self._ranked_at = now
            for model_queue in self._queues.values():
                model_queue.queue = [
                    (waiting.rank(now), waiting)
                    for _, waiting in model_queue.queue
                    if not waiting.turn.done()
                ]
                heapq.heapify(model_queue.queue)
