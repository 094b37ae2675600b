"""The caller of a request, read from its headers over HTTP and gRPC alike: tenant, priority,
deadline, trace."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec

from headwater.services.runtime import errors
from headwater.services.runtime.tracing import NoSpan, Span

from ..cache_hints import NO_HINTS, CacheHints
from .grant import Standing
from .tenants import Identity, Tenant, tenant_of

MAX_ID_LEN = 256
MAX_STATE_LEN = 512
MAX_DEADLINE_MS = 2**31 - 1
MAX_PRIORITY = 1000
EXPECTED = "x-headwater-expected-tokens"
MAX_EXPECTED_TOKENS = 1 << 24
MAX_GOAL_MS = 3_600_000
UNTRACED = NoSpan()
"""Span until the request's own begins."""


def _no_outcome(fault: errors.HeadwaterError | None) -> Mapping[str, int]:
    return {}


def new_request_id() -> str:
    return os.urandom(12).hex()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant that calls, and the terms of its request."""

    tenant: Tenant
    request_id: str = msgspec.field(default_factory=new_request_id)
    """The gateway's id, under which the request's data is kept."""
    client_request_id: str = ""
    """The client's id, which is only echoed."""
    priority: int = 0
    """Offset that is added to the tenant's tier, so that it can only lower the priority."""
    deadline: float | None = None
    """Time on the monotonic clock."""
    expected_tokens: int = 0
    """Length of the answer as the client expects it; 0: it does not say."""
    ttft_goal: float = 0.0
    """Seconds in which the first token is to come, a goal of the request or of its tenant; 0: there
    is none."""
    tpot_goal: float = 0.0
    """Seconds in which each later token is to come."""
    traceparent: str = ""
    """The header as the client sent it. Stages get the span's."""
    tracestate: str = ""
    span: Span = UNTRACED
    outcome: Callable[[errors.HeadwaterError | None], Mapping[str, int]] = _no_outcome
    """Attributes of the span by what the request ended with, in the words of its transport."""
    wants_receipt: bool = False
    hints: CacheHints = NO_HINTS
    standing: Standing = msgspec.field(default_factory=Standing)
    """State of the tenant's limits; set when the request is counted and charged."""

    @classmethod
    def of(
        cls, headers: Mapping[str, str], tenants: Identity, *, remaining: float | None = None
    ) -> Caller:
        """Reads lower-case header names; `remaining` is a deadline that the transport itself
        carries, in seconds."""
        tenant = tenant_of(tenants, headers)
        asked = headers.get("x-headwater-deadline-ms")
        if asked is not None:
            remaining = _whole("x-headwater-deadline-ms", asked, MAX_DEADLINE_MS) / 1e3
        return cls(
            tenant=tenant,
            client_request_id=printable(headers.get("x-request-id", "")),
            priority=_whole("x-priority", headers.get("x-priority"), MAX_PRIORITY),
            deadline=None if remaining is None else time.monotonic() + remaining,
            expected_tokens=_whole(EXPECTED, headers.get(EXPECTED), MAX_EXPECTED_TOKENS),
            ttft_goal=_goal(headers, "x-headwater-ttft-ms", tenant.ttft_goal_ms),
            tpot_goal=_goal(headers, "x-headwater-tpot-ms", tenant.tpot_goal_ms),
            traceparent=printable(headers.get("traceparent", "")),
            tracestate=_whole_entries(headers.get("tracestate", "")),
            wants_receipt=headers.get("x-headwater-receipt", "").lower() in ("1", "true", "yes"),
        )

    def with_hints(self, hints: CacheHints) -> Caller:
        """The caller with hints of the body; a length of the answer in the headers comes first."""
        return msgspec.structs.replace(
            self,
            hints=hints,
            expected_tokens=self.expected_tokens or hints.expected_tokens,
        )

    def with_body(self, request_id: str | None, priority: int | None) -> Caller:
        """The caller with the values of the body: an id if the headers have none, a priority that
        only lowers."""
        if not (request_id or priority):
            return self
        return msgspec.structs.replace(
            self,
            client_request_id=self.client_request_id or printable(request_id or ""),
            priority=max(self.priority, priority or 0),
        )

    def within(self, span: Span) -> Caller:
        """The caller whose request has this span."""
        return msgspec.structs.replace(self, span=span)

    @property
    def tier(self) -> int:
        """Tier of the request; lower runs first."""
        return self.tenant.tier + self.priority

    @property
    def shown_id(self) -> str:
        """The id that `x-request-id` answers."""
        return self.client_request_id or self.request_id

    def within_deadline(self) -> WithinDeadline:
        """Scope of the request's work: raises `DeadlineExceeded` once the deadline has passed; its
        span ends with the scope."""
        return WithinDeadline(self)

    @property
    def remaining_ms(self) -> int:
        """Milliseconds until the deadline, at least 1. 0: there is none."""
        if self.deadline is None:
            return 0
        return min(max(1, int((self.deadline - time.monotonic()) * 1e3)), MAX_DEADLINE_MS)


class WithinDeadline:
    """See `Caller.within_deadline`. NOTE: a class, since the context manager of a generator costs
    three times as much."""

    __slots__ = ("_caller", "_timeout")

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        deadline = self._caller.deadline
        if deadline is not None:
            self._timeout = asyncio.timeout(deadline - time.monotonic())
            await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fault = _fault_of(raised)
        try:
            if self._timeout is not None:
                await self._timeout.__aexit__(kind, raised, trace)
        except TimeoutError:
            fault = errors.DeadlineExceeded("the deadline of the request has passed")
            raise fault from None
        finally:
            span = self._caller.span
            span.describe(self._caller.outcome(fault))
            span.end("" if fault is None else fault.code)


def _fault_of(raised: BaseException | None) -> errors.HeadwaterError | None:
    """Error that a request's work ended with; None: none."""
    if raised is None or isinstance(raised, errors.HeadwaterError):
        return raised
    if isinstance(raised, asyncio.CancelledError):
        return errors.ClientGone("cancelled")
    return errors.InternalError("unforeseen")


def _goal(headers: Mapping[str, str], name: str, of_tenant: int) -> float:
    """Goal in seconds: the request's, or else its tenant's; 0: there is none."""
    asked = headers.get(name)
    return (of_tenant if asked is None else _whole(name, asked, MAX_GOAL_MS)) / 1e3


def printable(text: str) -> str:
    """Characters that may go back into a header and into the log."""
    if not text:
        return ""
    return "".join([char for char in text[:MAX_ID_LEN] if " " < char <= "~"])


def _whole_entries(tracestate: str) -> str:
    """The tracestate header as received. If it is longer than W3C asks to pass on, its most
    recently changed entries."""
    if not tracestate:
        return ""
    if not tracestate.isascii() or not tracestate.isprintable():
        return ""
    return (
        tracestate
        if len(tracestate) <= MAX_STATE_LEN
        else tracestate[: MAX_STATE_LEN + 1].rpartition(",")[0]
    )


def _whole(name: str, raw: str | None, limit: int) -> int:
    """The number in a header; 0 without one."""
    if raw is None:
        return 0
    # A number that int() would take but a header has no business with (signs, spaces, underscores)
    # is refused too.
    if not raw.isascii() or not raw.isdigit() or len(raw) > 10 or int(raw) > limit:
        raise errors.BadRequest.of(name, raw, f"a whole number, 0…{limit}")
    return int(raw)
