"""Limits of tenants, exact over all gateways: checked and reserved in one step on Redis's clock.

All counters of a tenant lie in one hash slot: a hash with one packed field a scope, a hash of open
reservations, a sorted set of their leases. A minute is any 60 seconds, counted in slots of 5 s that
expire whole. A reservation that is not renewed is given back except for the tokens that it is known
to have used, sooner where their number is known; one that is settled is remembered for a lease, so
that a renewal which was on its way does not bring it back. Knows nothing about the source of
tenants.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.services.runtime.store import Store

from .limit_script import CHANGE
from .records import Scope

LEASE_MS = 20_000
KEEP_MS = 86_400_000
"""Milliseconds for which counters are kept without a request; afterwards they are counted from the
usage records."""
PATIENCE_SECONDS = 1.0
"""Seconds to wait for Redis: a limit is worth more waiting than a routing hint."""
MAX_CALLS = 4
"""Largest number of calls at once; each takes a connection."""
NEVER = -1.0
"""Seconds to wait where no waiting helps."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that refuses a request."""

    scope: str
    limit: str
    """Limit that refuses: requests, tokens, concurrency or budget; share of budget: what a gateway
    grants by itself is used up; unknown: the spent tokens have to be counted first."""
    seconds: float
    """Seconds until the limit allows it; `NEVER` where time alone does not help."""


@dataclass(frozen=True, slots=True)
class Left:
    """Rest of one limit."""

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of one request: the number that would run at once, and the least number with which it
    can begin."""

    most: int
    least: int


NO_CHOICE = Choices(0, 0)
ONE_CHOICE = Choices(1, 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Number of tokens that may be used, or the reason for none."""

    granted: int
    refusal: Refusal | None = None
    requests: Left | None = None
    tokens: Left | None = None
    num_choices: int = 0
    """Number of choices that may run at once, for a reservation that was granted."""


class Limiter:
    """Client of the limits in one Redis, one for each gateway. Raises `StoreUnavailable` when Redis
    does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Semaphore(MAX_CALLS)

    async def reserve(
        self,
        tenant: str,
        id: str,
        scopes: Sequence[Scope],
        *,
        most: int,
        least: int,
        used: int = 0,
        choices: Choices = ONE_CHOICE,
    ) -> Verdict:
        """Reserves for a counted request between `least` and `most` tokens, of which `used` are
        used in any case, and as many of its choices as the limits have room for."""
        return await self._change(
            "reserve",
            tenant,
            id,
            scopes,
            most=most,
            least=least,
            used=used,
            choices=choices,
        )

    async def count(self, tenant: str, scopes: Sequence[Scope]) -> Verdict:
        """Counts a request: it takes one of the minute's requests and nothing else."""
        return await self._change("count", tenant, "", scopes)

    async def extend(
        self,
        tenant: str,
        id: str,
        scopes: Sequence[Scope],
        *,
        more: int,
        held: int,
        used: int,
        num_choices: int = 1,
    ) -> Verdict:
        """Renews a reservation that holds `held` tokens, of which `used` are used, and
        `num_choices`, and adds up to `more` tokens."""
        choices = Choices(num_choices, num_choices)
        return await self._change(
            "extend", tenant, id, scopes, most=more, least=held, used=used, choices=choices
        )

    async def settle(
        self, tenant: str, id: str, scopes: Sequence[Scope], *, used: int, seq: int
    ) -> None:
        """Ends a reservation. `seq` is the sequence number of its usage record, 0 before it is
        stored."""
        await self._change("settle", tenant, id, scopes, used=used, seq=seq)

    async def lapse(self, tenant: str, id: str, *, used: int, seq: int) -> None:
        """Ends a reservation of which `used` tokens were used, as if it had expired. Ignores an
        unknown one."""
        await self._change("lapse", tenant, id, [], used=used, seq=seq)

    async def begin_rebuild(self, tenant: str, scope: Scope) -> int:
        """Begins to count what a scope has spent; returns the time of that on Redis's clock, in
        ms."""
        return (await self._change("rebuild", tenant, "", [scope])).granted

    async def end_rebuild(
        self, tenant: str, scope: Scope, *, began: int, used: int, seq: int
    ) -> None:
        """Ends a count: `used` tokens were found in the usage records up to number `seq`. Changes
        nothing where another gateway has counted meanwhile, or this one took too long."""
        await self._change("rebuilt", tenant, "", [scope], used=used, seq=seq, began=began)

    async def _change(
        self,
        op: str,
        tenant: str,
        id: str,
        scopes: Sequence[Scope],
        *,
        most: int = 0,
        least: int = 0,
        used: int = 0,
        seq: int = 0,
        choices: Choices = ONE_CHOICE,
        began: int = 0,
    ) -> Verdict:
        tag = f"{{tenant:{tenant}}}"
        keys = [f"limits:{tag}", f"reservations:{tag}", f"leases:{tag}"]
        packed = msgspec.msgpack.encode([_plain(scope) for scope in scopes])
        args = [
            op,
            id,
            LEASE_MS,
            most,
            least,
            used,
            seq,
            packed,
            KEEP_MS,
            choices.most,
            choices.least,
            began,
        ]
        async with self._turn:
            reply = await self._store.run(CHANGE, keys, args, seconds=PATIENCE_SECONDS)
        granted, refused, (requests_left, tokens_left), num_choices = msgspec.msgpack.decode(reply)
        refusal = None
        if refused:
            scope, limit = (
                str(each, "utf-8") if isinstance(each, bytes) else str(each) for each in refused[:2]
            )
            refusal = Refusal(scope, limit, refused[2] / 1e3 if refused[2] >= 0 else NEVER)
        return Verdict(
            int(granted), refusal, _left(requests_left), _left(tokens_left), int(num_choices)
        )


def _plain(scope: Scope) -> dict[str, Any]:
    limits = scope.limits
    found = {
        "name": scope.name,
        "rpm": limits.requests_per_minute,
        "tpm": limits.tokens_per_minute,
        "running": limits.concurrency,
        "budget": limits.budget,
        "kind": limits.budget_period if limits.budget is not None else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _left(found: Sequence[float]) -> Left | None:
    return Left(int(found[0]), int(found[1]), found[2] / 1e3) if found else None


def period_of(kind: str, at: datetime.datetime) -> tuple[datetime.datetime, datetime.datetime]:
    """First moment of the period that `at` (UTC) is in, and of the next one."""
    begin = at.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return begin, begin + datetime.timedelta(days=1)
    begin = begin.replace(day=1)
    return begin, (begin + datetime.timedelta(days=32)).replace(day=1)
