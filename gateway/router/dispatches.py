"""Prompts that were sent where decisions said: what load, index and trust learn of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

import msgspec
import structlog

from headwater.services.index.feed import IndexFeed

from .choice import LastServed
from .decision import Decision
from .fleet import Fleet
from .lag import EventLag
from .load import InFlight
from .metrics import RouterMetrics
from .peers import Peers
from .recent_prompts import RecentPrompt, RecentPrompts
from .replica import Replica

EXPECT_SECONDS = 2.0
"""Least seconds for which the prompt of a dispatched request counts as cached at its replica."""


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


class Dispatches:
    """A request's life after its decision: `begin`, `started`, `finished`."""

    def __init__(
        self,
        fleet: Fleet,
        feed: IndexFeed,
        peers: Peers,
        lag: EventLag,
        last_served: LastServed,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        logged_share: float,
    ) -> None:
        """`logged_share` of the requests leave their receipts in the log."""
        self._fleet = fleet
        self._feed = feed
        self._peers = peers
        self._lag = lag
        self._last_served = last_served
        self._metrics = metrics
        self._clock = clock
        self._logged_share = logged_share
        self._recent_prompts = RecentPrompts()

    def recent_prompts(self) -> Iterator[RecentPrompt]:
        """The prompts that this gateway sent last, youngest first."""
        return self._recent_prompts.youngest_first(self._clock())

    def begin(self, decision: Decision, request_id: str, *, is_first: bool = True) -> Dispatch:
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
        self._last_served.note(decision.hashes, decision.replica_id, now)
        self._recent_prompts.add(decision.member.model_key, decision.hashes, now)
        believed = max(EXPECT_SECONDS, self._lag.expected_within, 2 * decision.predicted_seconds)
        if self._fleet.has(decision.member):
            self._feed.expect(
                decision.member, decision.hashes, believed, start=decision.num_matched_blocks
            )
        number = self._peers.added(decision.member, in_flight)
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
        self._peers.started(dispatch.number)
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
        self._peers.ended(dispatch.number)
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
