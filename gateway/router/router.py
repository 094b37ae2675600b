"""Chooses the replica that answers soonest: the one that holds the prompt's prefix, unless waiting
there costs more.

Knows membership, index and load; knows nothing about sessions, tenants or HTTP. One thread uses it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection

from prometheus_client import CollectorRegistry

from headwater.services.index.feed import IndexFeed
from headwater.services.index.kv_index import Column
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Member, new_epoch
from headwater.services.runtime.membership import Members

from .candidates import Asked, able, decide, look
from .capacity import Capacity
from .choice import LastServed, pick
from .decision import Decision
from .disaggregation import Disaggregation
from .dispatches import Dispatches
from .fleet import Fleet
from .holders import find_holder, replica_of
from .lag import EventLag
from .metrics import RouterMetrics, index_gauges, trust_gauge
from .peers import Peers
from .policy import Policy, seconds
from .replica import EXPECTED_OUTPUT, Incarnation, Replica

HASH_LEN = 16


class Router:
    """Use within `running`. A request's life: `consult` (may wait), `choose`, then as
    `dispatches` have it."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        feed: IndexFeed,
        *,
        registry: CollectorRegistry | None = None,
        score: Policy = seconds,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
        logged_share: float = 0.0,
    ) -> None:
        """`epoch` names this life of the gateway to others; drawn where it is not given.
        `logged_share` of the requests leave their receipts in the log."""
        self._members = members
        self._feed = feed
        self._score = score
        self._clock = clock
        self._fleet = Fleet(bus, members, clock)
        self.peers = Peers(bus, self._fleet, epoch or new_epoch(), clock)
        self._lag = EventLag()
        registry = registry if registry is not None else CollectorRegistry()
        self._metrics = RouterMetrics(registry)
        registry.register(index_gauges(lambda: feed.columns))
        registry.register(trust_gauge(self._fleet.trust))
        feed.on_age = self._on_age
        self._last_served = LastServed()
        self.capacity = Capacity(self._fleet, self.peers, clock)
        self.dispatches = Dispatches(
            self._fleet,
            feed,
            self.peers,
            self._lag,
            self._last_served,
            self._metrics,
            clock,
            logged_share,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Router]:
        """Follows membership and load inside the `with` block."""
        async with self._fleet.running(), self.peers.running():
            yield self

    def on_wake(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever an engine has woken."""
        self._fleet.on_wake = listener

    @property
    def has_replicas(self) -> bool:
        return bool(self._fleet)

    @property
    def had_replicas(self) -> bool:
        """Whether there has been a replica since the start."""
        return self._fleet.had_replicas

    def has_replica(self, model_key: str) -> bool:
        """An engine serves the model, is not leaving and does not sleep."""
        return any(not replica.is_away for replica in self._fleet.of(model_key).values())

    def engines(self, model_key: str) -> list[Member]:
        """The engines that serve a model."""
        return [replica.member for replica in self._fleet.of(model_key).values()]

    @property
    def model_keys(self) -> list[str]:
        """Keys of the models that have replicas."""
        return self._fleet.model_keys

    async def wait_for(self, model_key: str, exclude: Collection[Incarnation]) -> None:
        """Returns when a replica that is not in `exclude` serves the model."""

        def is_there(_: Members) -> bool:
            replicas = self._fleet.of(model_key).values()
            return any(not (each.is_away or each.incarnation in exclude) for each in replicas)

        await self._members.wait_for(is_there)

    def replicas(self) -> list[tuple[Replica, Column | None]]:
        """Each replica with the index's column of its cache; None where the index follows no events
        of it."""
        return [
            (each, self._feed.index(each.member.model_key).column(each.member.replica_id))
            for each in self._fleet.all()
        ]

    def holders(self, model_key: str, block_hash: bytes) -> list[str]:
        """Ids of the replicas that have said to hold a block."""
        columns = self._feed.index(model_key).columns
        return sorted(column.replica_id for column in columns if block_hash in column.stored)

    @property
    def event_lag(self) -> float:
        """Delay between an engine's caching of a block and its arrival here, beyond the least one,
        p99; 0: no events."""
        return self._lag.p99

    def num_uncached(self, model_key: str, block_hashes: bytes, num_prompt_tokens: int) -> int:
        """Tokens of a prompt that the replica which has most of it has to compute."""
        replicas = self._fleet.of(model_key)
        matched = self._feed.index(model_key).lookup(_split(block_hashes))
        cached = (
            int(replica.trust.value * matched.get(replica_id, 0) * replica.block_size)
            for replica_id, replica in replicas.items()
        )
        return num_prompt_tokens - min(max(cached, default=0), num_prompt_tokens - 1)

    async def consult(self, model_key: str, block_hashes: bytes) -> None:
        """Asks Redis where the local index is not sure of itself; returns at once where it is.
        Never raises."""
        if not self._feed.is_sure(model_key):
            await self._feed.consult(model_key, _split(block_hashes))

    def choose(
        self,
        model_key: str,
        block_hashes: bytes,
        num_prompt_tokens: int,
        max_tokens: int,
        exclude: Collection[Incarnation] = (),
        numerics_id: str = "",
        *,
        expected_tokens: int = EXPECTED_OUTPUT,
        adapter: bytes = b"",
        lender: Incarnation | None = None,
        may_hand_over: bool = False,
    ) -> Decision:
        """The replica for a prompt whose full blocks hash to `block_hashes` (16 bytes each, one
        after another).

        `expected_tokens`: predicted length of the answer. `adapter`: hash of its content, which the
        replica has to hold; empty: none. `exclude` names incarnations that failed
        this request; `numerics_id` is what its answer so far was computed with, if there is any;
        `lender` is the one that gave it away last, and may still hold its blocks. A request that
        may be handed over can be computed at two replicas. Raises `Unavailable` when none is left.
        """
        started = time.perf_counter()
        now = self._clock()
        hashes = _split(block_hashes)
        replicas = self._fleet.of(model_key)
        rates = self._fleet.rates(model_key, now)
        owner = replica_of(replicas, lender)
        roles = Disaggregation(replicas.values(), is_lent=bool(numerics_id) and owner is not None)
        num_answer_tokens = min(max_tokens, expected_tokens)
        asked = Asked(
            hashes, num_prompt_tokens, num_answer_tokens, exclude, numerics_id, owner, adapter
        )
        index = self._feed.index(model_key)
        seen = look(index, replicas, asked, roles, self._score, rates, now)
        chosen, reason = pick(able(seen), hashes, self._last_served)
        decision = decide(
            replicas[chosen.replica_id], chosen, reason, seen, hashes, num_prompt_tokens
        )
        decision.adapter = adapter
        decision.holder = find_holder(replicas, owner, decision, chosen, seen)
        if may_hand_over:
            of_kind = rates[decision.member.numerics_id]
            decision.successor = roles.successor(
                replicas[chosen.replica_id], seen, num_prompt_tokens, of_kind
            )
        self._metrics.decisions.add(reason)
        self._metrics.seconds(time.perf_counter() - started)
        return decision

    def _on_age(self, incarnation: Incarnation, age: float) -> None:
        self._metrics.event_lag(self._lag.observe(incarnation, age, self._clock()))


def _split(block_hashes: bytes) -> tuple[bytes, ...]:
    """NOTE: a tuple, since the garbage collector goes through lists for as long as their requests
    run."""
    return tuple(
        [block_hashes[start : start + HASH_LEN] for start in range(0, len(block_hashes), HASH_LEN)]
    )
