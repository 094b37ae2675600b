"""Admits choices: a bounded number runs at once, as long as the model's replicas have room for more
waiting prompts; the others wait in a bounded queue, in the order of the model's policy.

A request that waits long rises a tier at a time, so that none starves. Knows nothing about
replicas.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

from headwater.services.runtime import errors
from headwater.services.runtime.queue_policy import DEFAULT, Policies, refusals

from .model_queue import NO_TERMS, Entry, ModelQueue, Terms, Waiting

FREE_PROMPTS = 4
"""Prompts of each of several tenants that may wait at replicas even without room there: a replica
serves the tenant that is behind first, and can do so only for prompts that it has."""

KEPT = 16
"""One of `KEPT` turns is reserved from the tenant with the most turns, so that other tenants need
not wait for its answers to end."""

HasRoom = Callable[[str, int, int], bool]
"""Whether a model's replicas have room for one more waiting prompt. Arguments: uncached tokens that
are on their way there, and prompts that were sent and have not started."""


def anywhere(model_key: str, num_tokens: int, num_prompts: int) -> bool:
    """Always True: no bound."""
    return True


class Replicas(Protocol):
    """Facts about a model's replicas that the queue needs."""

    def policies(self, model_key: str) -> Policies:
        """Order of the model's queue."""
        ...

    def prompt_seconds(self, model_key: str, num_tokens: int) -> float:
        """Seconds until this many prompt tokens are computed, after the prompts that were sent
        before; 0 while unknown."""
        ...

    def has_blocks(self, model_key: str, num_blocks: int) -> bool:
        """Whether a replica has so many KV blocks for requests that are on their way there, or can
        have no more."""
        ...


class NoReplicas:
    """State without any known replica."""

    def policies(self, model_key: str) -> Policies:
        return Policies.of(DEFAULT)

    def prompt_seconds(self, model_key: str, num_tokens: int) -> float:
        return 0.0

    def has_blocks(self, model_key: str, num_blocks: int) -> bool:
        return True


SAMPLE_TOKENS = 1024
"""Prompt tokens by which the time of one is measured."""


class Turn:
    """The right of one choice, or of several that run together, to run. A context manager that
    returns the turn."""

    def __init__(
        self,
        admission: Admission,
        model_queue: ModelQueue,
        tenant: str,
        num_tokens: int,
        num_choices: int,
        num_blocks: int = 0,
        *,
        policy: str = "",
        fcfs_seconds: float = 0.0,
    ) -> None:
        """`fcfs_seconds`: how long the choice would have waited in order of arrival."""
        self.policy = policy
        self.fcfs_seconds = fcfs_seconds
        self._admission = admission
        self._model_queue = model_queue
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._num_choices = num_choices
        self._num_blocks = num_blocks
        self._is_started = self._is_over = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def sent(self) -> None:
        """Notes that the prompt was sent to a replica, or never will be."""
        self._model_queue.num_released_tokens -= self._num_tokens
        self._model_queue.num_released_blocks -= self._num_blocks
        self._num_tokens = 0
        self._num_blocks = 0

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
    """Gives turns in the order of the model's policy; by default the lowest tier first, then the
    tenant that was given least, then first come. A full queue refuses."""

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        has_room: HasRoom = anywhere,
        replicas: Replicas | None = None,
    ) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self._num_kept = max_running // KEPT
        self.num_running = 0
        self.num_queued = 0
        self.someone_waits = asyncio.Event()
        self.on_late: Callable[[str], None] = lambda policy: None
        """Called with the policy that refused a request in the queue."""
        self._has_room = has_room
        self._replicas = replicas or NoReplicas()
        self._queues: dict[str, ModelQueue] = {}
        self._clock = clock
        self._ranked_at = clock()
        self.queued_by_tier: Counter[int] = Counter()
        self._queued_by_tenant: Counter[str] = Counter()
        self._running_by_tenant: defaultdict[str, int] = defaultdict(int)
        self._arrivals = itertools.count()

    async def take(
        self,
        tier: int,
        virtual_time: float = 0.0,
        model_key: str = "",
        tenant: str = "",
        num_tokens: int = 0,
        num_choices: int = 1,
        terms: Terms = NO_TERMS,
    ) -> Turn:
        """Waits for a turn for `num_choices` that run together, with a prompt of `num_tokens`
        uncached ones. Raises `LimitExceeded` when the queue is full and no other tenant has more in
        it, or when this entry has to make room there; `DeadlineExceeded` when the policy refuses
        requests that would be late."""
        model_queue = self._queue_of(model_key)
        num_choices = min(num_choices, self.max_running)
        fcfs_seconds = 0.0
        if not self._may_pass(model_key, model_queue, tenant, num_choices, terms.num_blocks):
            fcfs_seconds = await self._wait(
                tier, virtual_time, model_key, tenant, num_tokens, num_choices, terms
            )
        else:
            self._take(model_queue, tenant, num_tokens, num_choices, terms.num_blocks)
        return Turn(
            self,
            model_queue,
            tenant,
            num_tokens,
            num_choices,
            terms.num_blocks,
            policy=model_queue.policies.of_tier(tier).name,
            fcfs_seconds=fcfs_seconds,
        )

    def try_take(self, model_key: str, tenant: str) -> Turn | None:
        """Takes a turn for one more choice of a prompt that has one already; None where it would
        have to wait."""
        model_queue = self._queue_of(model_key)
        if not self._may_pass(model_key, model_queue, tenant, 1, 0):
            return None
        self._take(model_queue, tenant, 0, 1, 0)
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
        running = self._running_by_tenant
        return {key: (running.get(key, 0), self._queued_by_tenant[key]) for key in keys}

    def waiting_tokens(self, model_key: str) -> int:
        """Number of tokens of the prompts that wait here."""
        return self._queue_of(model_key).num_waiting_tokens

    def give(self) -> None:
        """Gives turns to waiting entries as long as there are some. To be called when turns may
        have become free."""
        if not self.num_queued:
            self.someone_waits.clear()
            return
        self._rank_again()
        self._refuse_late()
        while (found := self._next()) is not None:
            model_queue, entry = found
            model_queue.remove(entry)
            waiting = entry[1]
            self._left(model_queue, waiting)
            self._take(
                model_queue,
                waiting.tenant,
                waiting.num_tokens,
                waiting.num_choices,
                waiting.terms.num_blocks,
            )
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
        model_key: str,
        tenant: str,
        num_tokens: int,
        num_choices: int,
        terms: Terms,
    ) -> float:
        """Waits for a turn. Returns the seconds that it would have waited in order of arrival."""
        if self.num_queued >= self.max_queued:
            if (greediest := self._greediest(tenant)) == tenant:
                raise self._is_full()
            self._refuse_last_of(greediest)
        model_queue = self._queue_of(model_key)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = Waiting(
            tier=tier,
            virtual_time=virtual_time,
            arrival=next(self._arrivals),
            since=self._clock(),
            tenant=tenant,
            num_tokens=num_tokens,
            num_choices=num_choices,
            terms=terms,
            turn=turn,
            place=model_queue.place(num_tokens),
        )
        model_queue.push(waiting)
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
                Turn(self, model_queue, tenant, num_tokens, num_choices, terms.num_blocks).release()
            raise
        return waiting.fcfs_seconds

    def _queue_of(self, model_key: str) -> ModelQueue:
        """The queue of a model, in the order of the policies that its replicas have now."""
        model_queue = self._queues.get(model_key)
        if model_queue is None:
            model_queue = self._queues[model_key] = ModelQueue(
                self._clock, seconds_per_token=lambda: self._seconds_per_token(model_key)
            )
        policies = self._replicas.policies(model_key)
        if policies != model_queue.policies:
            model_queue.policies = policies
            model_queue.rank_again(self._clock())
        return model_queue

    def _seconds_per_token(self, model_key: str) -> float:
        behind = self._replicas.prompt_seconds(model_key, SAMPLE_TOKENS)
        return (behind - self._replicas.prompt_seconds(model_key, 0)) / SAMPLE_TOKENS

    def _take(
        self,
        model_queue: ModelQueue,
        tenant: str,
        num_tokens: int,
        num_choices: int,
        num_blocks: int,
    ) -> None:
        self.num_running += num_choices
        self._running_by_tenant[tenant] += num_choices
        model_queue.unstarted[tenant] += 1
        model_queue.num_released_tokens += num_tokens
        model_queue.num_released_blocks += num_blocks

    def _left(self, model_queue: ModelQueue, waiting: Waiting) -> None:
        """Takes an entry out of the counts of its queue."""
        model_queue.left(waiting)
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
            for rank, waiting in model_queue.entries()
            if waiting.tenant == tenant
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
        self,
        model_key: str,
        model_queue: ModelQueue,
        tenant: str,
        num_choices: int,
        num_blocks: int,
    ) -> bool:
        """Whether a newcomer need not wait."""
        is_first = (
            not model_queue.num_waiting
            and self._has_turns(tenant, num_choices)
            and self._has_room_for(model_key, model_queue, num_blocks)
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

    def _has_room_for(self, model_key: str, model_queue: ModelQueue, num_blocks: int) -> bool:
        return self._has_room(
            model_key, model_queue.num_released_tokens, sum(model_queue.unstarted.values())
        ) and self._replicas.has_blocks(model_key, model_queue.num_released_blocks + num_blocks)

    def _is_free(self, model_queue: ModelQueue, tenant: str, num_choices: int) -> bool:
        """Whether other tenants have taken all room and this one has next to nothing."""
        num_own = model_queue.unstarted.get(tenant, 0)
        is_next_to_nothing = num_own < FREE_PROMPTS and len(model_queue.unstarted) > (num_own > 0)
        return is_next_to_nothing and self._has_turns(tenant, num_choices)

    def _next(self) -> tuple[ModelQueue, Entry] | None:
        """Queue and entry that go next among those with room."""
        found = [
            (model_queue, entry)
            for key, model_queue in self._queues.items()
            if (entry := self._first(key, model_queue)) is not None
        ]
        return min(found, key=lambda each: each[0].turn(each[1]), default=None)

    def _first(self, model_key: str, model_queue: ModelQueue) -> Entry | None:
        """Entry that may have the next turn. Others pass the tenant from which the last turns are
        reserved."""
        first = model_queue.first()
        if first is None or not self._has_room_for(
            model_key, model_queue, first[1].terms.num_blocks
        ):
            return None
        if self._has_turns(first[1].tenant, first[1].num_choices):
            return first
        if first[1].tenant != (has_most := self._has_most()):
            # The request waits for more turns than are left, and no other request passes it
            # meanwhile.
            return None
        second = model_queue.first_of_others(has_most)
        return (
            second
            if second is not None and self._has_turns(second[1].tenant, second[1].num_choices)
            else None
        )

    def _refuse_late(self) -> None:
        """Refuses entries whose first token cannot come in time, under a policy that does so."""
        for model_key, model_queue in self._queues.items():
            if any(policy.refuses for policy in model_queue.policies.all):
                self._refuse_late_of(model_key, model_queue)

    def _refuse_late_of(self, model_key: str, model_queue: ModelQueue) -> None:
        now = self._clock()
        begin = now + self._replicas.prompt_seconds(model_key, model_queue.num_released_tokens)
        for waiting, late in list(refusals(model_queue.dues(now), begin)):
            message = f"a first token would come {late:.2f} s too late"
            waiting.turn.set_exception(errors.DeadlineExceeded(message, retry_after=late))
            self._left(model_queue, waiting)
            self.on_late(model_queue.policy_of(waiting, now).name)

    def _rank_again(self) -> None:
        """Sorts the queues anew, once a second at most, for the entries that have risen
        meanwhile."""
        if (now := self._clock()) - self._ranked_at >= 1.0:
            self._ranked_at = now
            for model_key in list(self._queues):
                self._queue_of(model_key).rank_again(now)
