"""Chooses the replica that answers soonest: the one that holds the prompt's prefix, unless waiting
there costs more.

Knows membership, index and load; knows nothing about sessions, tenants or HTTP. One thread uses it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from zlib import crc32

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from headwater.services.index.feed import IndexFeed
from headwater.services.index.kv_index import Column
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.member import Member, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.queue_policy import DEFAULT, Policies, PolicyError

from . import policy, rendezvous
from .decision import Candidate, Decision, shown
from .disaggregation import MISPLACED, Disaggregation
from .fleet import Fleet
from .holders import find_holder, num_lent_tokens, replica_of
from .lag import EventLag
from .load import InFlight
from .metrics import RouterMetrics, index_gauges, trust_gauge
from .peers import Peers
from .policy import Policy
from .rates import Rates
from .recent_prompts import RecentPrompt, RecentPrompts
from .replica import EXPECTED_OUTPUT, Incarnation, Replica

HASH_LEN = 16
EXPECT_SECONDS = 2.0
"""Least seconds for which the prompt of a dispatched request counts as cached at its replica."""
_MAX_PREFIXES = 20_000
"""Number of prefixes whose last replicas are remembered."""
NO_ADAPTER = "no adapter"
"""Guard of a replica that does not hold the request's adapter; it never gives way."""
_LAST_RESORT = (MISPLACED, "full", "inexact", "failing", "asleep")
"""Guards that are overruled, in this order, when every replica has a guard."""


class Dispatch(msgspec.Struct):
    """A request that was sent where a decision said."""

    decision: Decision
    request_id: str
    replica: Replica
    successor: Replica | None
    in_flight: InFlight
    sent_at: float
    number: int
    """Number under which the other gateways know it."""
    is_first: bool
    """Whether it carries the first of its request's prompts."""
    is_over: bool = False


class _Asked(msgspec.Struct, frozen=True):
    """A prompt for which a replica is looked for; see `Router.choose`."""

    hashes: tuple[bytes, ...]
    num_tokens: int
    num_answer_tokens: int
    """Predicted."""
    exclude: Collection[Incarnation]
    numerics_id: str
    owner: Replica | None
    """The lender, where it is still there."""
    adapter: bytes
    """Hash of the adapter's content; empty: none."""


class Router:
    """Use within `running`. A request's life: `consult` (may wait), `choose`, `dispatched`,
    `started`, `finished`."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        feed: IndexFeed,
        *,
        registry: CollectorRegistry | None = None,
        score: Policy = policy.seconds,
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
        self._logged_share = logged_share
        self._fleet = Fleet(bus, members, clock)
        self.peers = Peers(bus, self._fleet, epoch or new_epoch(), clock)
        self._lag = EventLag()
        registry = registry if registry is not None else CollectorRegistry()
        self._metrics = RouterMetrics(registry)
        registry.register(index_gauges(lambda: feed.columns))
        registry.register(trust_gauge(self._fleet.trust))
        feed.on_age = self._on_age
        self._last_served: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._recent_prompts = RecentPrompts()

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

    def recent_prompts(self) -> Iterator[RecentPrompt]:
        """The prompts that this gateway sent last, youngest first."""
        return self._recent_prompts.youngest_first(self._clock())

    @property
    def event_lag(self) -> float:
        """Delay between an engine's caching of a block and its arrival here, beyond the least one,
        p99; 0: no events."""
        return self._lag.p99

    def num_in_flight(self, model_key: str) -> int:
        """Requests on their way or running, of all gateways that tell."""
        return sum(replica.load.num_requests for replica in self._fleet.of(model_key).values())

    def has_room(self, model_key: str, num_tokens: int, num_prompts: int) -> bool:
        """Replicas let this gateway have one more prompt waiting there: beside `num_tokens` that
        are on their way there, and `num_prompts` that were sent and have not started.

        A replica needs no more prompts waiting than it runs at once. Short prompts within its
        credit of tokens would be hundreds, sent in one burst that holds up everything else.
        """
        now = self._clock()
        room = float(-num_tokens)
        num_seats = 0
        is_served = False
        rates = self._fleet.rates(model_key, now)
        for replica in self._fleet.of(model_key).values():
            if replica.is_away:
                continue
            is_served = True
            num_seats += replica.load.reported.max_running or sys.maxsize
            credit = replica.load.reported.waiting_credits.get(self.peers.epoch)
            if credit is None:
                room = math.inf
            else:
                room += max(
                    0.0,
                    credit
                    - replica.load.sent_tokens(now, rates[replica.member.numerics_id].prefill_tps),
                )
            if room > 0 and num_prompts < num_seats:
                return True
        # If no replica accepts requests, the request is sent to one anyway, whose answer names the
        # reason.
        return not is_served

    def policies(self, model_key: str) -> Policies:
        """Order of a model's queue, as its replicas have it."""
        for replica in self._fleet.of(model_key).values():
            try:
                return Policies.of(replica.load.reported.policy)
            except PolicyError:
                # A later version of the engine has a policy that this gateway does not know.
                continue
        return Policies.of(DEFAULT)

    def prompt_seconds(self, model_key: str, num_tokens: int) -> float:
        """Seconds until replicas have computed this many prompt tokens after their waiting prompts;
        0 while no replica has reported its speed."""
        now = self._clock()
        rates = self._fleet.rates(model_key, now)
        speed = 0.0
        num_sent = 0.0
        for replica in self._fleet.of(model_key).values():
            if not replica.is_away and replica.load.reported.prefill_tps:
                tps = rates[replica.member.numerics_id].prefill_tps
                speed += tps
                num_sent += replica.load.drain_tokens(now, tps)
        return (num_sent + num_tokens) / speed if speed else 0.0

    def has_blocks(self, model_key: str, num_blocks: int) -> bool:
        """Whether a replica has room for this many KV blocks beside its running and sent requests.
        A replica without requests takes any number."""
        is_known = False
        for replica in self._fleet.of(model_key).values():
            if replica.is_away or not replica.load.reported.num_total_blocks:
                continue
            is_known = True
            num_used = replica.load.used_blocks()
            if not num_used or num_used + num_blocks <= replica.load.reported.num_total_blocks:
                return True
        return not is_known

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
        asked = _Asked(
            hashes, num_prompt_tokens, num_answer_tokens, exclude, numerics_id, owner, adapter
        )
        seen = self._look(model_key, replicas, asked, roles, rates, now)
        able = _able(seen)
        if not able:
            raise _none_left(seen)
        chosen, reason = self._pick(able, hashes)
        decision = _decide(
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

    def dispatched(self, decision: Decision, request_id: str, *, is_first: bool = True) -> Dispatch:
        """Counts a prompt that leaves for the chosen replica, and its blocks. Receipts are logged
        of the first prompt of a request alone."""
        now = self._clock()
        replica = self._fleet.replica(decision.member)
        num_uncached = decision.num_uncached_tokens
        in_flight = replica.load.add(
            num_uncached, num_uncached // decision.block_size + 1, now, is_own=True
        )
        replica.load.send_adapter(decision.adapter, now)
        replica.breaker.sent(now)
        successor = self._fleet.expect(decision.successor)
        self._remember(rendezvous.prefix_of(decision.hashes), decision.replica_id, now)
        self._recent_prompts.add(decision.member.model_key, decision.hashes, now)
        believed = max(EXPECT_SECONDS, self._lag.expected_within, 2 * decision.predicted_seconds)
        if self._fleet.has(decision.member):
            self._feed.expect(
                decision.member, decision.hashes, believed, start=decision.num_matched_blocks
            )
        number = self.peers.added(decision.member, in_flight)
        return Dispatch(decision, request_id, replica, successor, in_flight, now, number, is_first)

    def started(self, dispatch: Dispatch, cached_tokens: int) -> None:
        """Notes that the prompt is computed; `cached_tokens` of it were found in the cache."""
        decision = dispatch.decision
        replica = dispatch.replica
        now = self._clock()
        replica.load.started(dispatch.in_flight, now)
        replica.breaker.succeeded()
        if decision.actual_cached_tokens is not None:
            return
        self.peers.started(dispatch.number)
        decision.actual_cached_tokens = cached_tokens
        decision.actual_seconds = now - dispatch.sent_at
        replica.trust.observe(decision.predicted_cached_tokens, cached_tokens)
        self._metrics.predicted.add(by=decision.predicted_cached_tokens)
        self._metrics.actual.add(by=cached_tokens)
        replica.routed.add(
            decision.num_prompt_tokens, decision.predicted_cached_tokens, cached_tokens
        )
        if replica.trust.is_doubted:
            self._metrics.doubted.add(replica.member.replica_id)
            self._feed.doubt(replica.member)

    def finished(self, dispatch: Dispatch, *, failed: bool = False) -> None:
        """Notes that the request has ended there. `failed`: by a fault of the replica, which is
        then left alone for a while."""
        if dispatch.is_over:
            return
        dispatch.is_over = True
        now = self._clock()
        dispatch.replica.load.ended(dispatch.in_flight, now)
        self.peers.ended(dispatch.number)
        if dispatch.successor is not None:
            dispatch.successor.num_expected -= 1
        if failed:
            dispatch.replica.breaker.failed(now)
        if dispatch.is_first and (failed or self._is_logged(dispatch.request_id)):
            structlog.get_logger().info(
                "routed", request_id=dispatch.request_id, receipt=dispatch.decision.receipt
            )

    def _is_logged(self, request_id: str) -> bool:
        """Whether a request's decisions are logged: those of all its attempts, on all gateways, or
        none."""
        return crc32(request_id.encode()) < self._logged_share * (1 << 32)

    def _on_age(self, incarnation: Incarnation, age: float) -> None:
        self._metrics.event_lag(self._lag.observe(incarnation, age, self._clock()))

    def _look(
        self,
        model_key: str,
        replicas: Mapping[str, Replica],
        asked: _Asked,
        roles: Disaggregation,
        rates: Mapping[str, Rates],
        now: float,
    ) -> list[Candidate]:
        """Scores every replica of the model."""
        index = self._feed.index(model_key)
        num_tokens = asked.num_tokens
        matched = index.lookup(asked.hashes)
        num_lent = (
            num_tokens
            if asked.owner is not None
            else num_lent_tokens(replicas, matched, asked.exclude, now)
            if matched
            else 0
        )
        seen = []
        for replica_id, replica in replicas.items():
            matched_tokens = matched.get(replica_id, 0) * replica.block_size
            if replica is asked.owner:
                # Events of these blocks may not have arrived yet.
                matched_tokens = num_tokens
            of_kind = rates[replica.member.numerics_id]
            parts = replica.parts(
                num_tokens,
                matched_tokens,
                asked.num_answer_tokens,
                of_kind,
                now,
                num_lent,
                asked.adapter,
            )
            parts = roles.with_costs(replica, parts, num_tokens, of_kind)
            guard = "failed" if replica.incarnation in asked.exclude else replica.guard(parts, now)
            guard = guard if replica.has_adapter(asked.adapter) else NO_ADAPTER
            if not guard and asked.numerics_id and replica.member.numerics_id != asked.numerics_id:
                guard = "inexact"
            guard = guard or roles.guard(replica)
            is_synced, cached = replica.standing(index.column(replica_id))
            age = replica.load_age(now)
            seen.append(
                Candidate(
                    replica_id,
                    parts,
                    self._score(parts),
                    replica.trust.value,
                    is_synced,
                    age,
                    guard,
                    cached,
                )
            )
        return seen

    def _pick(self, able: list[Candidate], hashes: tuple[bytes, ...]) -> tuple[Candidate, str]:
        """The best candidate; of those about as good, the one with the fewest requests, then the
        one least recently used for the prefix; for a prompt that is cached nowhere, first the one
        whose cache has the most room."""
        if len(able) == 1:
            return able[0], "only"
        prefix = rendezvous.prefix_of(hashes)
        if prefix and not any(each.is_synced or each.parts.matched_tokens for each in able):
            return _nearest(able, prefix), "home"
        best = min(able, key=lambda each: each.cost)
        limit = best.cost * (1 + policy.SPREAD)
        served = self._last_served.get(prefix, {})
        is_new = not any(each.parts.matched_tokens for each in able)
        chosen = min(
            (each for each in able if each.cost <= limit),
            key=lambda each: (
                each.cached if is_new else 0,
                each.parts.num_requests,
                served.get(each.replica_id, 0.0),
                each.cost,
            ),
        )
        if chosen is not best and chosen.cost > best.cost:
            return chosen, "spread"
        return chosen, "prefix" if chosen.parts.matched_tokens else "load"

    def _remember(self, prefix: bytes, replica_id: str, now: float) -> None:
        self._last_served.setdefault(prefix, {})[replica_id] = now
        self._last_served.move_to_end(prefix)
        if len(self._last_served) > _MAX_PREFIXES:
            self._last_served.popitem(last=False)


def _split(block_hashes: bytes) -> tuple[bytes, ...]:
    """NOTE: a tuple, since the garbage collector goes through lists for as long as their requests
    run."""
    return tuple(
        [block_hashes[start : start + HASH_LEN] for start in range(0, len(block_hashes), HASH_LEN)]
    )


def _able(seen: list[Candidate]) -> list[Candidate]:
    """Candidates that no guard excludes. If there are none, those of the first guard that may be
    overruled."""
    for allowed in ("", *_LAST_RESORT):
        able = [each for each in seen if each.guard == allowed]
        if able:
            return able
    return []


def _nearest(able: list[Candidate], prefix: bytes) -> Candidate:
    """The prefix's home, unless waiting there costs more than to compute the prefix elsewhere."""
    by_id = {each.replica_id: each for each in able}
    limit = min(policy.load_only(each.parts) + policy.ALPHA * each.parts.own for each in able)
    order = [by_id[replica_id] for replica_id in rendezvous.by_distance(prefix, list(by_id))]
    return next((each for each in order if policy.load_only(each.parts) <= limit), order[0])


def _decide(
    replica: Replica,
    chosen: Candidate,
    reason: str,
    seen: list[Candidate],
    hashes: tuple[bytes, ...],
    num_prompt_tokens: int,
) -> Decision:
    block_size = replica.block_size
    parts = chosen.parts
    return Decision(
        member=replica.member,
        reason=reason,
        candidates=shown(seen, chosen),
        num_candidates=len(seen),
        hashes=hashes,
        num_prompt_tokens=num_prompt_tokens,
        num_matched_blocks=parts.matched_tokens // block_size,
        block_size=block_size,
        max_chunk_tokens=replica.load.reported.max_chunk_tokens,
        # A token is always computed, and only whole blocks are found.
        predicted_cached_tokens=min(parts.matched_tokens, num_prompt_tokens - 1)
        // block_size
        * block_size,
        predicted_seconds=parts.drain + parts.own,
    )


def _none_left(seen: list[Candidate]) -> Unavailable:
    if not seen:
        return Unavailable("no replica of the model is within reach", code="no_replica")
    reasons = ", ".join(f"{each.replica_id} {each.guard}" for each in seen)
    return Unavailable(f"no replica can take the request: {reasons}", code="no_replica")
