"""One request's right to use tokens: as many as its tenant's limits allow, a lease at a time, exact
to the token.

An engine computes no token of an answer without credit, and credit is given against a lease only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from headwater.services.runtime import errors
from headwater.services.runtime.tasks import start_in

from .entrance import Entrance
from .limiter import NEVER, Left, Refusal, Verdict
from .records import Scope
from .tenants import Tenant

LEASE_TOKENS = 1024
"""Number of tokens that an answer is leased at first: the credit that a choice has on its way."""
MAX_WAIT_SECONDS = 20.0
"""Seconds that an answer waits for the minute's tokens: less than an engine holds a stream without
credit."""
END_SECONDS = 0.5
"""Seconds within which an answer that got all its tokens has to end."""


class Credited(Protocol):
    """An answer whose engine computes as many tokens as it has credit for."""

    credit_left: int
    """Number of tokens that may still come."""

    @property
    def num_unleased(self) -> int:
        """Number of tokens of the longest possible answer that it has no credit for yet."""

    def give(self, num_tokens: int) -> None:
        """Adds credit."""

    def refuse(self, error: errors.LimitExceeded) -> None:
        """Ends the answer by `error`, unless it has ended."""


class Counts(Protocol):
    """A stage that also counts the used tokens, in case this gateway dies before it has stored the
    usage record."""

    def recorded(self, record_id: str) -> None: ...


class More(Protocol):
    """Source of more tokens."""

    async def extend(self, grant: Grant, tokens: int) -> Verdict: ...


@dataclass(slots=True)
class Standing:
    """The rest of a tenant's tightest limits, for the headers of an answer."""

    requests: Left | None = None
    tokens: Left | None = None
    is_counted: bool = False
    """Whether the request was counted against its tenant's requests a minute."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = []
        for name, left in (("requests", self.requests), ("tokens", self.tokens)):
            if left is not None:
                values = (
                    ("limit", left.limit),
                    ("remaining", left.remaining),
                    ("reset", f"{left.reset_seconds:.0f}s"),
                )
                found += [
                    (f"x-ratelimit-{word}-{name}".encode(), str(value).encode())
                    for word, value in values
                ]
        return found


@dataclass(slots=True, eq=False, kw_only=True)
class Grant:
    """Grant of `granted` tokens for prompts and answers."""

    tenant: Tenant
    request_id: str
    scopes: list[Scope]
    more: More | None = None
    """Source of more tokens; None: the tenant has no limits."""
    granted: int = 0
    is_local: bool = False
    """Whether it was given without Redis."""
    num_choices: int = 1
    """Largest number of choices that may run at once."""
    first_credit: int = LEASE_TOKENS
    """Credit that each choice begins with, in tokens."""
    used_before: int = 0
    """Number of prompt tokens, less the tokens of answers that were charged before."""
    num_output_tokens: int = 0
    charged_prompt_tokens: int = 0
    """Number of prompt tokens that earlier gateways have charged."""
    charged_output_tokens: int = 0
    """Number of output tokens that earlier gateways have charged."""
    num_prompts: int = 1
    entrance: Entrance = field(init=False)
    """Entrance of its choices to the queue; no more of them run at once than its tenant's limits
    allow."""
    counted_by: set[Counts] = field(default_factory=set)
    refusal: errors.LimitExceeded | None = None
    """Error of the tenant's limits. Set once no more is given."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _ends: list[asyncio.TimerHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entrance = Entrance(num_prompts=self.num_prompts)

    @property
    def used(self) -> int:
        return self.used_before + self.num_output_tokens

    def received(self, choice: Credited, num_tokens: int) -> None:
        """Counts a step's tokens of a choice. The last granted token ends the choice, unless it
        ends by a stop."""
        self.num_output_tokens += num_tokens
        choice.credit_left -= num_tokens
        if choice.credit_left <= 0 and self.refusal is not None:
            self._end_soon(choice)

    def taken(self, choice: Credited, num_tokens: int) -> None:
        """Counts tokens that the client has read: the engine may go on, as far as limits allow."""
        if self.more is None:
            choice.give(num_tokens)
        elif self.refusal is None and (wanted := min(num_tokens, choice.num_unleased)) > 0:
            start_in(self._tasks, self._extend(choice, wanted))

    def recorded(self, seq: int) -> None:
        """Notes that its usage record is stored."""
        for each in self.counted_by:
            each.recorded(self.request_id)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for each in self._ends:
            each.cancel()
        # The leases hold these choices.
        self._ends.clear()

    async def _extend(self, choice: Credited, wanted: int) -> None:
        assert self.more is not None
        waited = 0.0
        while wanted > 0:
            verdict = await self.more.extend(self, wanted)
            if (refusal := verdict.refusal) is None:
                self.granted += verdict.granted
                wanted -= verdict.granted
                choice.give(verdict.granted)
            elif refusal.seconds != NEVER and waited + refusal.seconds <= MAX_WAIT_SECONDS:
                waited += refusal.seconds
                await asyncio.sleep(refusal.seconds)
            else:
                self.refusal = refused(refusal, self.tenant.id)
                if choice.credit_left <= 0:
                    self._end_soon(choice)
                return

    def _end_soon(self, choice: Credited) -> None:
        self._ends.append(asyncio.get_running_loop().call_later(END_SECONDS, self._end, choice))

    def _end(self, choice: Credited) -> None:
        if self.refusal is not None:
            choice.refuse(self.refusal)


OUT_OF_BUDGET = "insufficient_quota"
LIMIT_TOO_LOW = "limit_too_low"
"""Codes of refusals against which waiting a minute does not help."""
_SENTENCES = {
    "requests": "its requests a minute are used up",
    "tokens": "its tokens a minute do not suffice",
    "concurrency": "as many of its choices run as may at once",
    "budget": "its budget does not suffice",
    "share of budget": "its budget cannot be checked, and the share of it that counts meanwhile "
    "is used up",
}
_LONG_SECONDS = 3600.0


def refused(refusal: Refusal, tenant: str) -> errors.LimitExceeded:
    """Error that names the owner of the limit and the limit."""
    owner = (
        f"tenant {tenant}" if refusal.scope == "tenant" else f"{refusal.scope} of tenant {tenant}"
    )
    seconds = refusal.seconds if refusal.seconds != NEVER else _LONG_SECONDS
    error = errors.LimitExceeded(f"{owner}: {_SENTENCES[refusal.limit]}", retry_after=seconds)
    if refusal.limit == "budget":
        error.code = OUT_OF_BUDGET
    elif refusal.seconds == NEVER:
        error.code = LIMIT_TOO_LOW
    return error
