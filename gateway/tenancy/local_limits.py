"""Limits while Redis does not answer: each gateway grants a declared share of every limit by itself.

Forgets its grants when Redis is back: settlements report the used tokens to Redis. Knows one gateway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .limiter import NEVER, NO_CHOICE, ONE_CHOICE, Choices, Left, Refusal, Verdict, requests_alone
from .records import Scope

WINDOW_SECONDS = 60.0


@dataclass(slots=True)
class _Counts:
    taken: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(time, requests, tokens) of each grant of the last minute."""
    running: int = 0
    spent: int = 0

    def forget_before(self, now: float) -> None:
        while self.taken and self.taken[0][0] <= now - WINDOW_SECONDS:
            self.taken.popleft()


class LocalLimits:
    """Grants `share` of each limit; 0 grants nothing that is limited."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._counts: dict[tuple[str, str], _Counts] = {}

    def count(self, tenant: str, scopes: Sequence[Scope]) -> Verdict:
        """See `Limiter.count`."""
        return self.reserve(tenant, [requests_alone(each) for each in scopes], most=0, least=0, choices=NO_CHOICE)

    def reserve(
        self,
        tenant: str,
        scopes: Sequence[Scope],
        *,
        most: int,
        least: int,
        requests: int = 1,
        choices: Choices = ONE_CHOICE,
    ) -> Verdict:
        """See `Limiter.reserve`. More tokens for a running request take no requests and choices."""
        now, num_choices = self._clock(), choices.most
        requests_left: Left | None = None
        for scope in scopes:
            counts, limits = self._of(tenant, scope), scope.limits
            counts.forget_before(now)
            if limits.budget is not None:
                most = min(most, self._part(limits.budget) - counts.spent)
                if most < least:
                    return Verdict(0, Refusal(scope.name, "budget", NEVER))
            if limits.tokens_per_minute is not None:
                limit = self._part(limits.tokens_per_minute)
                most = min(most, limit)
                used = sum(tokens for _, _, tokens in counts.taken)
                if most < least or used + most > limit:
                    return Verdict(0, Refusal(scope.name, "tokens", self._wait(counts, now)))
            if requests and limits.requests_per_minute is not None:
                limit = self._part(limits.requests_per_minute)
                left = limit - sum(number for _, number, _ in counts.taken)
                requests_left = Left(limit, max(0, left - 1), WINDOW_SECONDS)
                if left < 1:
                    return Verdict(0, Refusal(scope.name, "requests", self._wait(counts, now)))
            if num_choices and limits.concurrency is not None:
                limit = self._part(limits.concurrency)
                num_choices = min(num_choices, limit - counts.running)
                if num_choices < choices.least:
                    return Verdict(0, Refusal(scope.name, "concurrency", 1.0 if choices.least <= limit else NEVER))
        for scope in scopes:
            counts = self._of(tenant, scope)
            counts.taken.append((now, requests, most))
            counts.spent += most
            counts.running += num_choices
        return Verdict(most, requests=requests_left, num_choices=num_choices)

    def settle(self, tenant: str, scopes: Sequence[Scope], *, unused: int, num_choices: int = 1) -> None:
        now = self._clock()
        for scope in scopes:
            counts = self._of(tenant, scope)
            counts.running = max(0, counts.running - num_choices)
            counts.spent = max(0, counts.spent - unused)
            if unused and counts.taken:
                counts.taken.append((now, 0, -unused))

    def forget(self) -> None:
        """Forgets all grants: Redis is back, and the next outage begins anew."""
        self._counts = {key: counts for key, counts in self._counts.items() if counts.running}
        for counts in self._counts.values():
            counts.taken.clear()
            counts.spent = 0

    def _part(self, limit: int) -> int:
        """Share of a limit, at least one unless the limit is 0."""
        return max(1, int(limit * self._share)) if self._share and limit else 0

    def _wait(self, counts: _Counts, now: float) -> float:
        return max(1.0, counts.taken[0][0] + WINDOW_SECONDS - now) if counts.taken else NEVER

    def _of(self, tenant: str, scope: Scope) -> _Counts:
        return self._counts.setdefault((tenant, scope.name), _Counts())
