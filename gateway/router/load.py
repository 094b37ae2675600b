"""How busy one replica is: what gateways sent there, to the token and at once, and what the replica
reports.

A report is always a little late, and late reports send every request of a burst to the same
replica; requests that this gateway sent, or that other gateways report to have sent, are therefore
counted here, and a replica's report only corrects the count.
"""

from __future__ import annotations

import math

import msgspec

from headwater.services.runtime.member import ReplicaLoad

_SETTLED_SECONDS = 1.0
"""Seconds after which a load report includes a request for sure."""


class InFlight(msgspec.Struct, eq=False):
    """A request that this gateway, or another gateway, sent to a replica."""

    num_tokens: int
    """Tokens of its prompt that are to be computed, as far as known."""
    num_blocks: int
    """Blocks that it will take."""
    sent_at: float
    is_own: bool = False
    """Sent by this gateway."""


class Load:
    """Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self.reported = ReplicaLoad()
        self.reported_at: float | None = None
        self.num_requests = 0
        """Requests of all gateways that are on their way there or run there, as reported."""
        self._unstarted: dict[InFlight, None] = {}
        self._own_tokens = 0
        self._own_blocks = 0
        self._sent_tokens = 0
        """Part of `_own_tokens` that this gateway sent."""
        self._others_tokens = 0.0
        self._head_since = 0.0
        self._sent_adapters: dict[bytes, float] = {}
        """Time at which requests were last sent from here, by the hash of their adapter."""

    def add(
        self, num_tokens: int, num_blocks: int, now: float, *, is_own: bool = False
    ) -> InFlight:
        """Counts a request that is sent to the replica, from this gateway or from another one."""
        if not self._unstarted:
            self._head_since = now
        request = InFlight(num_tokens, num_blocks, now, is_own)
        self._unstarted[request] = None
        self._own_tokens += num_tokens
        self._sent_tokens += num_tokens * is_own
        self._own_blocks += num_blocks
        self.num_requests += 1
        return request

    def started(self, request: InFlight, now: float) -> None:
        """Notes that the request's prompt is computed; from now on the replica's own reports count
        its blocks."""
        if request in self._unstarted:
            del self._unstarted[request]
            self._own_tokens -= request.num_tokens
            self._sent_tokens -= request.num_tokens * request.is_own
            self._own_blocks -= request.num_blocks
            self._head_since = now

    def ended(self, request: InFlight, now: float) -> None:
        """Takes the end of a request, whether it succeeded or not. Call once."""
        self.started(request, now)
        self.num_requests -= 1

    def send_adapter(self, digest: bytes, now: float) -> None:
        """Notes the adapter of a request that this gateway sends to the replica."""
        if digest:
            self._sent_adapters[digest] = now

    def has_on_device(self, digest: bytes, now: float) -> bool:
        """Whether the adapter with this hash is on the device, or will be for a request that was
        sent there; true without an adapter."""
        sent_at = self._sent_adapters.get(digest, -math.inf)
        is_sent = now - sent_at < _SETTLED_SECONDS
        return not digest or is_sent or digest in self.reported.resident_adapters

    def report(self, load: ReplicaLoad, now: float) -> None:
        """Takes a load message.

        What it counts beyond the requests known here belongs to gateways out of reach. What it
        counts less is done, or on its way: only requests that it must know by now are written off.
        """
        self.reported = load
        self.reported_at = now
        self._sent_adapters = {
            digest: at for digest, at in self._sent_adapters.items() if now - at < _SETTLED_SECONDS
        }
        own = self._own_pending(now)
        self._others_tokens = max(0.0, load.num_prefill_tokens - own)
        if load.num_prefill_tokens == 0 and load.num_waiting == 0:
            for request in [
                each for each in self._unstarted if now - each.sent_at > _SETTLED_SECONDS
            ]:
                self.started(request, now)

    def drain_tokens(self, now: float, tps: float) -> float:
        """Prompt tokens that wait or run there: those sent, less those that must be computed by now
        at `tps`."""
        age = now - self.reported_at if self.reported_at is not None else 0.0
        return self._own_pending(now, tps) + max(0.0, self._others_tokens - tps * age)

    def sent_tokens(self, now: float, tps: float) -> float:
        """Like `drain_tokens`, for requests of this gateway alone. The replica's progress is
        divided among gateways by their share of the tokens."""
        return (
            self._own_pending(now, tps) * self._sent_tokens / self._own_tokens
            if self._sent_tokens
            else 0.0
        )

    def used_blocks(self) -> int:
        """Blocks in use there, or soon in use by requests that the replica has not started."""
        return self.reported.num_used_blocks + self._own_blocks

    def batch(self) -> int:
        """Requests that decode together, as reported or as known here."""
        return max(self.reported.num_running, self.num_requests - len(self._unstarted)) + len(
            self._unstarted
        )

    def _own_pending(self, now: float, tps: float = 0.0) -> float:
        """NOTE: the first request in line is not done before its replica reports it, so progress
        ends just before it."""
        if not self._unstarted:
            return 0.0
        head = next(iter(self._unstarted))
        progress = min(tps * (now - self._head_since), 0.95 * head.num_tokens)
        return self._own_tokens - progress
