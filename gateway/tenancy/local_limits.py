"""Limits while Redis does not answer: each gateway grants a declared share of every limit by
itself.

Forgets its grants when Redis is back: settlements report the used tokens to Redis. Knows one
gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .limiter import NEVER, ONE_CHOICE, Choices, Left, Refusal, Verdict
from .records import Scope

SLOT_SECONDS = 5.0
NUM_SLOTS = 13
"""A minute is any 60 seconds, counted in slots that expire whole, as Redis counts it."""
WINDOW_SECONDS = NUM_SLOTS * SLOT_SECONDS
BUDGET = ("budget", NEVER)
SHARE_OF_BUDGET = ("share of budget", 5.0)
"""Limits that refuse, each with the seconds until another try is worth it."""
REQUESTS = 0
TOKENS = 1
"""Columns of a slot."""


@dataclass(slots=True)
class _Counts:
    slots: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of requests and of tokens granted in each slot of the last minute, oldest slot
    first."""
    running: int = 0
    spent: int = 0

    def forget_before(self, slot: int) -> None:
        """Drops the slots that are over in `slot`."""
        for old in [each for each in self.slots if each <= slot - NUM_SLOTS]:
            del self.slots[old]

    def in_window(self, column: int) -> int:
        return sum(counts[column] for counts in self.slots.values())

    def take(self, slot: int, requests: int, tokens: int) -> None:
        counts = self.slots.setdefault(slot, [0, 0])
        counts[REQUESTS] += requests
        counts[TOKENS] += tokens

    def give_back(self, tokens: int) -> None:
        """Gives tokens back to the youngest slots, from which they were most likely taken."""
        for counts in reversed(self.slots.values()):
            part = min(tokens, counts[TOKENS])
            counts[TOKENS] -= part
            tokens -= part

    def wait_for(self, column: int, excess: int, now: float) -> float:
        """Seconds until so much of the window is over; `NEVER` where it holds less."""
        for slot, counts in self.slots.items():
            excess -= counts[column]
            if excess <= 0:
                return max(1.0, (slot + NUM_SLOTS) * SLOT_SECONDS - now)
        return NEVER


class LocalLimits:
    """Grants `share` of each limit; 0 grants nothing that is limited."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._counts: dict[tuple[str, str], _Counts] = {}

    def count(self, tenant: str, scopes: Sequence[Scope]) -> Verdict:
        """See `Limiter.count`."""
        now = self._clock()
        slot = int(now // SLOT_SECONDS)
        requests_left: Left | None = None
        for scope in scopes:
            counts = self._of(tenant, scope)
            counts.forget_before(slot)
            if scope.limits.requests_per_minute is None:
                continue
            limit = self._part(scope.limits.requests_per_minute)
            left = limit - counts.in_window(REQUESTS)
            requests_left = Left(limit, max(0, left - 1), WINDOW_SECONDS)
            if left < 1:
                wait = counts.wait_for(REQUESTS, 1 - left, now)
                return Verdict(0, Refusal(scope.name, "requests", wait), requests=requests_left)
        for scope in scopes:
            self._of(tenant, scope).take(slot, 1, 0)
        return Verdict(0, requests=requests_left)

    def reserve(
        self,
        tenant: str,
        scopes: Sequence[Scope],
        *,
        most: int,
        least: int,
        choices: Choices = ONE_CHOICE,
    ) -> Verdict:
        """See `Limiter.reserve`. More tokens for a running request take no choices."""
        now = self._clock()
        num_choices = choices.most
        slot = int(now // SLOT_SECONDS)
        for scope in scopes:
            counts = self._of(tenant, scope)
            limits = scope.limits
            counts.forget_before(slot)
            if limits.budget is not None:
                most = min(most, self._part(limits.budget) - counts.spent)
                if most < least:
                    # What is left of the budget is known when Redis is back.
                    limit_and_wait = BUDGET if least > limits.budget else SHARE_OF_BUDGET
                    return Verdict(0, Refusal(scope.name, *limit_and_wait))
            if limits.tokens_per_minute is not None:
                limit = self._part(limits.tokens_per_minute)
                most = min(most, limit)
                excess = counts.in_window(TOKENS) + most - limit
                if most < least:
                    # What only the share is too small for fits when Redis is back.
                    is_never = least > limits.tokens_per_minute
                    return Verdict(
                        0, Refusal(scope.name, "tokens", NEVER if is_never else WINDOW_SECONDS)
                    )
                if excess > 0:
                    return Verdict(
                        0, Refusal(scope.name, "tokens", counts.wait_for(TOKENS, excess, now))
                    )
            if num_choices and limits.concurrency is not None:
                limit = self._part(limits.concurrency)
                num_choices = min(num_choices, limit - counts.running)
                if num_choices < choices.least:
                    wait = 1.0 if choices.least <= limits.concurrency else NEVER
                    return Verdict(0, Refusal(scope.name, "concurrency", wait))
        for scope in scopes:
            counts = self._of(tenant, scope)
            counts.take(slot, 0, most)
            counts.spent += most
            counts.running += num_choices
        return Verdict(most, num_choices=num_choices)

    def settle(
        self, tenant: str, scopes: Sequence[Scope], *, unused: int, num_choices: int = 1
    ) -> None:
        for scope in scopes:
            counts = self._of(tenant, scope)
            counts.running = max(0, counts.running - num_choices)
            counts.spent = max(0, counts.spent - unused)
            counts.give_back(unused)

    def forget(self) -> None:
        """Forgets all grants: Redis is back, and the next outage begins anew."""
        self._counts = {key: counts for key, counts in self._counts.items() if counts.running}
        for counts in self._counts.values():
            counts.slots.clear()
            counts.spent = 0

    def _part(self, limit: int) -> int:
        """Share of a limit, at least one unless the limit is 0."""
        return max(1, int(limit * self._share)) if self._share and limit else 0

    def _of(self, tenant: str, scope: Scope) -> _Counts:
        return self._counts.setdefault((tenant, scope.name), _Counts())
