"""Requests that wait for a row: ready ones in order of rank, and those held until credit or their
prefix comes.

Within a tier, tenants that have their share of seats come after those that have less. Knows nothing
about blocks or budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ...kv.block_source import Ticket
from ..table.request_state import Rank, RequestState

RISE_SECONDS = 30.0
"""Seconds in a tier after which a request moves to the one above."""


Ready = list[tuple[Rank, int, RequestState]]
"""A heap."""
Promote = Callable[[RequestState, float], bool]
"""Moves a request up that has waited for long by now; whether its rank has changed."""


def rise_a_tier(request: RequestState, now: float) -> bool:
    tier, key, arrival = request.rank
    if tier <= 0 or now - max(request.added_at, request.risen_at) < RISE_SECONDS:
        return False
    request.rank = (tier - 1, key, arrival)
    request.risen_at = now
    return True


class WaitingQueue:
    """A heap of the ready of each tenant, with lazy removal below the top; the held are members
    too, and count."""

    def __init__(
        self,
        num_shares: Callable[[RequestState], int] = lambda _: 0,
        virtual_time: Callable[[RequestState], float] = lambda _: 0.0,
    ) -> None:
        """`num_shares` and `virtual_time` are asked for the first request of each tenant: the
        shares that the tenant has already, and the virtual time of its turn, where ranks of tenants
        are not compared."""
        self.num_tokens = 0
        """Uncached tokens of all members that have credit."""
        self.may_rise = False
        """Whether a member may be below the first tier."""
        self.rise_at = 0.0
        """Time before which nobody looks whether a member has waited for long."""
        self._members: dict[int, RequestState] = {}
        self._num_shares = num_shares
        self._virtual_time = virtual_time
        self._ready: dict[str, Ready] = {}
        """Keyed by tenant; none is empty, and each begins with a member."""
        self._without_credit: set[int] = set()
        self._next: RequestState | None = None
        """The ready request that is next, as long as nothing has changed since it was found."""
        # By leader: followers, each with the number of blocks the leader must have scheduled first.
        self._followers: dict[int, list[tuple[int, RequestState]]] = {}
        self._awaiting: dict[Ticket, list[RequestState]] = {}
        """Requests held until the load of a part of their prefix has ended; some may be members no
        longer."""
        self._aside: list[RequestState] = []
        """Requests that others pass until blocks come free; some may be members no longer."""

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: RequestState) -> None:
        self._members[request.key] = request
        self.may_rise |= request.rank[0] > 0
        if request.credit > 0:
            self.num_tokens += request.num_uncached_tokens
            self._make_ready(request)
        else:
            self._without_credit.add(request.key)

    @property
    def num_ready(self) -> int:
        """Number of ready requests; ended ones that are not removed yet are counted too."""
        return sum(map(len, self._ready.values()))

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have a ready request."""
        return len(self._ready)

    def peek(self) -> RequestState | None:
        """The ready request that is next."""
        if self._next is None and self._ready:
            firsts = [ready[0][2] for ready in self._ready.values()]
            self._next = min(firsts, key=self._turn) if len(firsts) > 1 else firsts[0]
        return self._next

    def reorder(self) -> None:
        """Chooses the next request anew; called when the share of a tenant has changed."""
        self._next = None

    def heads(self) -> list[RequestState]:
        """The first ready request of each tenant, as their turns come."""
        return sorted((ready[0][2] for ready in self._ready.values()), key=self._turn)

    def pop(self, request: RequestState) -> None:
        """Takes the first of a tenant."""
        self._unready(request)
        self.remove(request)

    def rise(self, now: float, promote: Promote = rise_a_tier) -> None:
        """Moves up requests that have waited for long: none starves. `now` is of the clock of
        `added_at`."""
        risen = self.may_rise = False
        for request in self._members.values():
            self.may_rise |= request.rank[0] > 0
            risen |= promote(request, now)
        self._next = None
        for tenant, ready in self._ready.items() if risen else ():
            members = {key: request for _, key, request in ready if key in self._members}
            self._ready[tenant] = [(request.rank, key, request) for key, request in members.items()]
            heapify(self._ready[tenant])

    def remove(self, request: RequestState) -> None:
        self._next = None
        del self._members[request.key]
        if request.key in self._without_credit:
            self._without_credit.remove(request.key)
        else:
            self.num_tokens -= request.num_uncached_tokens
        self._clear_top(request.tenant)

    def add_credit(self, request: RequestState, tokens: int) -> None:
        request.credit += tokens
        if request.credit > 0 and request.key in self._without_credit:
            self._without_credit.remove(request.key)
            self.num_tokens += request.num_uncached_tokens
            self._make_ready(request)

    def await_leader(self, leader: RequestState, request: RequestState, num_blocks: int) -> None:
        """Holds the first of a tenant until `leader`, which computes the same prefix, has scheduled
        `num_blocks` of it."""
        self._unready(request)
        self._followers.setdefault(leader.key, []).append((num_blocks, request))

    def leader_advanced(self, leader: RequestState, num_blocks: int) -> None:
        """Frees followers of a leader that has scheduled its first `num_blocks` blocks."""
        followers = self._followers.pop(leader.key, [])
        if remaining := [held for held in followers if held[0] > num_blocks]:
            self._followers[leader.key] = remaining
        for needed, request in followers:
            if needed <= num_blocks and request.key in self._members:
                self._make_ready(request)

    def leader_left(self, leader: RequestState) -> None:
        """Frees every follower: a new one of them will lead."""
        for _, request in self._followers.pop(leader.key, []):
            if request.key in self._members:
                self._make_ready(request)

    def await_load(self, request: RequestState, ticket: Ticket) -> None:
        """Holds the first of a tenant until a load of blocks of its prefix has ended."""
        self._unready(request)
        self._awaiting.setdefault(ticket, []).append(request)

    def awaits(self, ticket: Ticket) -> bool:
        """Whether a request is held until this load has ended."""
        return bool(self._held_for(ticket))

    @property
    def awaits_any_load(self) -> bool:
        return any(map(self._held_for, self._awaiting))

    @property
    def awaits_begun(self) -> bool:
        """Whether a member whose answer has begun is held until a load has ended."""
        return any(
            request.has_begun for held in map(self._held_for, self._awaiting) for request in held
        )

    def load_ended(self, ticket: Ticket) -> list[RequestState]:
        """Makes requests ready that waited for this load, and returns them."""
        freed = self._held_for(ticket)
        self._awaiting.pop(ticket, None)
        for request in freed:
            self._make_ready(request)
        return freed

    def set_aside(self, request: RequestState) -> None:
        """Lets others pass the first of a tenant until `bring_back`."""
        self._unready(request)
        self._aside.append(request)

    def bring_back(self) -> None:
        aside, self._aside = self._aside, []
        for request in aside:
            if request.key in self._members:
                self._make_ready(request)

    def in_order(self) -> list[RequestState]:
        """Ready requests by rank."""
        ready = (entry for entries in self._ready.values() for entry in entries)
        return [each for _, key, each in sorted(ready) if key in self._members]

    def recount(self, request: RequestState, num_uncached_tokens: int) -> None:
        """Notes that a member has another number of tokens to compute than was believed."""
        if request.key not in self._without_credit:
            self.num_tokens += num_uncached_tokens - request.num_uncached_tokens
        request.num_uncached_tokens = num_uncached_tokens

    def _held_for(self, ticket: Ticket) -> list[RequestState]:
        """Members that are held until this load has ended."""
        return [
            request for request in self._awaiting.get(ticket, ()) if request.key in self._members
        ]

    def _turn(self, request: RequestState) -> tuple[int, int, float, Rank]:
        return (
            request.rank[0],
            self._num_shares(request),
            self._virtual_time(request),
            request.rank,
        )

    def _make_ready(self, request: RequestState) -> None:
        self._next = None
        heappush(self._ready.setdefault(request.tenant, []), (request.rank, request.key, request))

    def _unready(self, request: RequestState) -> None:
        self._next = None
        taken = heappop(self._ready[request.tenant])[2]
        assert taken is request
        self._clear_top(request.tenant)

    def _clear_top(self, tenant: str) -> None:
        ready = self._ready.get(tenant)
        if ready is None:
            return
        while ready and ready[0][2].key not in self._members:
            heappop(ready)
        if not ready:
            del self._ready[tenant]
