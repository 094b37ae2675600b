"""A replica as the router knows it: who it is, how busy, how reliable, how far its column is
believed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headwater.services.index.kv_index import Column
from headwater.services.runtime.member import Member
from headwater.services.runtime.role import BOTH

from .breaker import Breaker
from .cost import ADAPTER_SECONDS, GUARD_FILLED, Parts, pressure
from .load import Load
from .rates import Rates
from .trust import Trust

Incarnation = tuple[str, int]
"""A replica's name and its epoch."""
EXPECTED_OUTPUT = 128
"""Tokens of an answer that room is wanted for, where its length is not predicted; few requests use
all that they may."""


@dataclass(slots=True, eq=False)
class RoutedTokens:
    """Prompt tokens of the requests that this gateway sent to a replica and that were computed
    there."""

    num_prompt: int = 0
    num_predicted: int = 0
    """Prompt tokens that were believed to be cached when they were sent."""
    num_cached: int = 0
    """Prompt tokens that were found cached."""

    def add(self, num_prompt: int, num_predicted: int, num_cached: int) -> None:
        self.num_prompt += num_prompt
        self.num_predicted += num_predicted
        self.num_cached += num_cached


@dataclass(slots=True, eq=False)
class Replica:
    member: Member
    load: Load = field(default_factory=Load)
    trust: Trust = field(default_factory=Trust)
    breaker: Breaker = field(default_factory=Breaker)
    routed: RoutedTokens = field(default_factory=RoutedTokens)
    num_expected: int = 0
    """Requests of this gateway whose prompts are computed elsewhere, and that will probably go on
    here."""
    block_size: int = field(init=False)
    """Tokens of a block; the same for all members of a model."""

    def __post_init__(self) -> None:
        assert self.member.model is not None
        self.block_size = self.member.model.block_size

    def parts(
        self,
        num_prompt_tokens: int,
        matched_tokens: int,
        num_answer_tokens: int,
        rates: Rates,
        now: float,
        lent_tokens: int = 0,
        adapter: bytes = b"",
    ) -> Parts:
        """The cost of a request here, with `matched_tokens` of its prompt in the index,
        `lent_tokens` of it at another replica, and the adapter with that hash."""
        reported = self.load.reported
        block_size = self.block_size
        believed = min(int(self.trust.value * matched_tokens), num_prompt_tokens - 1)
        num_uncached = num_prompt_tokens - believed
        num_blocks = self.load.used_blocks() + (num_uncached + num_answer_tokens) // block_size + 1
        filled = num_blocks / reported.num_total_blocks if reported.num_total_blocks else 0.0
        return Parts(
            drain=self.load.drain_tokens(now, rates.prefill_tps) / rates.prefill_tps,
            own=self._prefill_seconds(num_prompt_tokens, believed, lent_tokens, rates),
            pressure=pressure(filled),
            slow=rates.itl(self.load.batch() + 1),
            matched_tokens=matched_tokens,
            num_requests=self.load.num_requests,
            filled=filled,
            evict=(num_uncached + num_answer_tokens) * reported.eviction_cost / rates.prefill_tps,
            adapter=0.0 if self.load.has_on_device(adapter, now) else ADAPTER_SECONDS,
        )

    def _prefill_seconds(
        self, num_tokens: int, num_cached: int, num_lent: int, rates: Rates
    ) -> float:
        """Seconds of a prefill. Tokens that are not cached here are computed, or pulled where that
        is sooner."""
        num_pulled = max(0, min(num_lent, num_tokens - 1) - num_cached)
        num_computed = num_tokens - num_cached - num_pulled
        seconds = num_computed / rates.prefill_tps + num_pulled * self.seconds_per_pulled_token(
            rates
        )
        return seconds + num_cached * self._seconds_per_hit_token(rates)

    def seconds_per_pulled_token(self, rates: Rates) -> float:
        """Seconds to pull a token; those to compute one for an engine that cannot pull or computes
        faster."""
        return min(self.load.reported.seconds_per_pulled_token or math.inf, 1 / rates.prefill_tps)

    def _seconds_per_hit_token(self, rates: Rates) -> float:
        """Seconds to bring a token from another tier to the device; those to compute it, where that
        is faster."""
        return min(self.load.reported.seconds_per_hit_token, 1 / rates.prefill_tps)

    def standing(self, column: Column | None) -> tuple[bool, int]:
        """Two facts of the index: it has all that this incarnation reported; and how full the cache
        is by that, in sixteenths, since finer differences mean nothing once caches are full."""
        if column is None or column.epoch != self.member.epoch:
            return False, 0
        return column.is_synced, 16 * len(column.stored) // (
            self.load.reported.num_total_blocks or 1
        )

    def guard(self, parts: Parts, now: float) -> str:
        """Why the replica should not get the request; empty: it may."""
        if self.is_draining:
            return "draining"
        if not self.load.reported.is_awake:
            return "asleep"
        if self.breaker.is_open(now):
            return "failing"
        return "full" if parts.filled > GUARD_FILLED else ""

    def has_adapter(self, digest: bytes) -> bool:
        """Whether its requests may have the adapter; all may have none."""
        return not digest or any(
            each.digest == digest and not each.is_evicted for each in self.member.adapters
        )

    @property
    def can_pull(self) -> bool:
        return self.load.reported.seconds_per_pulled_token > 0

    @property
    def role(self) -> str:
        return self.load.reported.role or BOTH

    @property
    def is_draining(self) -> bool:
        return self.member.draining or self.load.reported.draining

    @property
    def is_away(self) -> bool:
        """Whether it computes nothing new: it leaves, or sleeps."""
        reported = self.load.reported
        return self.member.draining or reported.draining or not reported.is_awake

    def load_age(self, now: float) -> float:
        return now - self.load.reported_at if self.load.reported_at is not None else -1.0

    @property
    def incarnation(self) -> tuple[str, int]:
        return self.member.replica_id, self.member.epoch
