"""Charges tenants: counts a request before anything is prepared for it, reserves its tokens before
it runs, renews while it does, settles when it ends, records what it used.

One for a gateway. Without Redis the local share of the limits counts; nothing fails for want of it
otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import structlog

from headwater.services.runtime import errors
from headwater.services.runtime.fault_log import FaultLog
from headwater.services.runtime.store import STORE_FAILURES, StoreUnavailable
from headwater.services.runtime.tasks import owned_task, start_in
from headwater.services.runtime.usage_log import UsageLog, UsageRecord

from .caller import Caller
from .charged import Charged
from .exhausted_limits import ExhaustedLimits
from .grant import LEASE_TOKENS, Grant, Standing, refused
from .limiter import LEASE_MS, NO_CHOICE, Choices, Limiter, Refusal, Verdict
from .local_limits import LocalLimits
from .records import Scope
from .spent_budgets import SpentBudgets
from .tenants import Tenant
from .token_counts import ResumedRequest, TokenNeed, TokenUse

UNCOUNTED = "what was spent is not known"
NOT_OF_THE_REQUEST = (errors.LimitExceeded, errors.Unavailable, errors.Unauthenticated)
"""Errors that are not the request's fault: they are not counted."""
ScopesOf = Callable[[Tenant, str], list[Scope]]


def unlimited(tenant: Tenant, model: str) -> list[Scope]:
    """Limits where no tenants are kept: none."""
    return []


class Accounts:
    """The accounts of a gateway's requests. Use within `running`."""

    def __init__(
        self,
        limiter: Limiter,
        usage: UsageLog,
        *,
        gateway_id: str,
        scopes_of: ScopesOf = unlimited,
        fail_open_share: float = 1.0,
    ) -> None:
        self.gateway_id = gateway_id
        self._limiter = limiter
        self._usage = usage
        self._scopes_of = scopes_of
        self._local = LocalLimits(fail_open_share)
        self._is_open = fail_open_share > 0
        self._is_alone = False
        self._grants: set[Grant] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self.exhausted = ExhaustedLimits()
        self._spent = SpentBudgets(limiter, usage)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Accounts]:
        async with self._usage.running(), owned_task(self._renew()), owned_task(self._let_lapse()):
            yield self

    def paid(
        self, caller: Caller, model: str, need: TokenNeed, use: Callable[[], TokenUse]
    ) -> contextlib.AbstractAsyncContextManager[Grant]:
        """Scope of the run of a counted request; `use` is called at its end. Raises
        `LimitExceeded` where limits leave less than the request needs, `Unavailable` where limits
        cannot be checked."""
        granted = self._reserve(caller, model, need)
        return Charged(granted, lambda *ended: self._end(caller, model, *ended), use)

    @contextlib.asynccontextmanager
    async def resumed(
        self, caller: Caller, model: str, request: ResumedRequest, use: Callable[[], TokenUse]
    ) -> AsyncIterator[Grant]:
        """Scope of the rest of a request. Tokens that were charged for it are not charged again."""
        if request.is_charged:
            yield Grant(tenant=caller.tenant, request_id=caller.request_id, scopes=[])
            return
        granted = self._take_over(caller, model, request)
        async with Charged(granted, lambda *ended: self._end(caller, model, *ended), use) as grant:
            yield grant

    async def _end(
        self,
        caller: Caller,
        model: str,
        grant: Grant,
        use: TokenUse,
        seconds: float,
        raised: BaseException | None,
    ) -> None:
        """Records what a request has used, whatever ended it."""
        grant.close()
        self._grants.discard(grant)
        outcome = "done" if raised is None else "error"
        if isinstance(raised, (errors.ClientGone, asyncio.CancelledError)):
            outcome = "cancelled"
        record = self._record(caller.tenant, model, grant, use, outcome, seconds)
        if grant.more is None:
            self._usage.add(record, grant.recorded)
        else:
            # The tokens of a request are settled even when its client is gone.
            await asyncio.shield(asyncio.create_task(self._settle(grant, record)))

    async def count(self, tenant: Tenant, standing: Standing, model: str = "") -> None:
        """Takes a request's place in its tenant's minute, once, before anything is prepared for it.
        The place is not returned, whatever becomes of the request. Raises as `paid` does."""
        if standing.is_counted:
            return
        standing.is_counted = True
        scopes = self._scopes_of(tenant, model)
        if not scopes or all(each.limits.requests_per_minute is None for each in scopes):
            return
        try:
            verdict = await self._limiter.count(tenant.key, scopes)
            self._with_redis()
        except StoreUnavailable as failure:
            self._without_redis(failure)
            if not self._is_open:
                raise errors.Unavailable(
                    "limits cannot be checked", code="limits_unavailable"
                ) from None
            verdict = self._local.count(tenant.key, scopes)
        standing.requests = verdict.requests
        standing.tokens = verdict.tokens
        if verdict.refusal is not None:
            self.exhausted.note(tenant, verdict)
            raise refused(verdict.refusal, tenant.id)

    async def after_refusal(
        self, tenant: Tenant, standing: Standing, error: errors.HeadwaterError
    ) -> errors.HeadwaterError:
        """Counts a request that is refused with `error` among those of the minute, unless it was
        counted before or the refusal is not its own. Returns the error to answer with: the one of
        the limit, where the minute is used up."""
        if standing.is_counted or isinstance(error, NOT_OF_THE_REQUEST):
            return error
        try:
            await self.count(tenant, standing)
        except errors.LimitExceeded as exhausted:
            return exhausted
        except errors.Unavailable:
            # The request is refused in any case.
            pass
        return error

    async def extend(self, grant: Grant, tokens: int) -> Verdict:
        tenant = grant.tenant.key
        scopes = grant.scopes
        try:
            verdict = await self._hold(grant, used=grant.used, more=tokens)
            if verdict.refusal is not None and verdict.refusal.limit == "unknown":
                if not await self._spent.rebuild(tenant, scopes, verdict.refusal.scope):
                    raise StoreUnavailable(UNCOUNTED)
                return Verdict(0, Refusal(verdict.refusal.scope, "budget", 0.1))
            self._with_redis()
            return verdict
        except StoreUnavailable as failure:
            self._without_redis(failure)
            return self._local.reserve(tenant, scopes, most=tokens, least=1, choices=NO_CHOICE)

    async def _reserve(self, caller: Caller, model: str, need: TokenNeed) -> Grant:
        tenant = caller.tenant
        scopes = self._scopes_of(tenant, model)
        grant = Grant(
            tenant=tenant,
            request_id=caller.request_id,
            scopes=scopes,
            num_prompts=need.num_prompts,
        )
        if not scopes:
            return grant
        prompts = need.prompt_tokens
        verdict = await self._request_or_cancel(
            grant,
            most=prompts + need.first_tokens,
            least=prompts + need.num_answers,
            used=prompts,
            choices=Choices(need.num_seats, need.num_first_seats),
        )
        caller.standing.tokens = verdict.tokens
        if verdict.refusal is not None:
            raise refused(verdict.refusal, tenant.id)
        grant.granted = verdict.granted
        grant.more = self
        grant.used_before = prompts
        grant.num_choices = grant.entrance.most = verdict.num_choices
        if need.num_answers:
            grant.first_credit = min(LEASE_TOKENS, (verdict.granted - prompts) // need.num_answers)
        else:
            grant.first_credit = 1
        self._grants.add(grant)
        return grant

    async def _take_over(self, caller: Caller, model: str, request: ResumedRequest) -> Grant:
        """Continues the reservation of a gateway that died and charged nothing. Otherwise reserves
        the tokens that may still follow anew."""
        scopes = self._scopes_of(caller.tenant, model)
        is_charged = bool(request.charged_prompt_tokens)
        grant = Grant(
            tenant=caller.tenant,
            request_id=f"{request.request_id}.{request.num_readers}"
            if is_charged
            else request.request_id,
            scopes=scopes,
            charged_prompt_tokens=request.charged_prompt_tokens,
            charged_output_tokens=request.charged_output_tokens,
        )
        if not scopes:
            return grant
        if is_charged:
            grant.used_before = -request.charged_output_tokens
            choices = Choices(request.num_seats, request.num_seats)
            outstanding = request.num_outstanding
            verdict = await self._request_or_cancel(
                grant, most=outstanding, least=outstanding, choices=choices
            )
            caller.standing.tokens = verdict.tokens
            if verdict.refusal is not None:
                raise refused(verdict.refusal, grant.tenant.id)
            grant.granted = verdict.granted
            grant.num_choices = verdict.num_choices
        else:
            await self._adopt(grant, request)
        grant.more = self
        self._grants.add(grant)
        return grant

    async def _adopt(self, grant: Grant, request: ResumedRequest) -> None:
        """Tells Redis that the reservation is this gateway's."""
        prompt_tokens = request.prompt_tokens
        grant.num_choices = request.num_seats
        grant.used_before = prompt_tokens
        grant.granted = prompt_tokens + request.granted
        try:
            await self._hold(grant, used=prompt_tokens + request.num_tokens)
            self._with_redis()
        except StoreUnavailable as failure:
            self._without_redis(failure)

    async def _hold(self, grant: Grant, *, used: int, more: int = 0) -> Verdict:
        tenant = grant.tenant.key
        held = grant.granted
        return await self._limiter.extend(
            tenant,
            grant.request_id,
            grant.scopes,
            more=more,
            held=held,
            used=used,
            num_choices=grant.num_choices,
        )

    async def _request_or_cancel(
        self, grant: Grant, *, most: int, least: int, choices: Choices, used: int = 0
    ) -> Verdict:
        """Like `_request`. A request that is cancelled before Redis answers holds no
        reservation."""
        asking = asyncio.create_task(
            self._request(grant, most=most, least=least, choices=choices, used=used)
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            start_in(self._leaving, self._give_back(grant, asking))
            raise

    async def _give_back(self, grant: Grant, asking: asyncio.Task[Verdict]) -> None:
        with contextlib.suppress(StoreUnavailable, errors.Unavailable):
            verdict = await asking
            if verdict.refusal is None and grant.is_local:
                num_choices = verdict.num_choices
                self._local.settle(
                    grant.tenant.key, grant.scopes, unused=verdict.granted, num_choices=num_choices
                )
            if verdict.refusal is None:
                await self._limiter.settle(
                    grant.tenant.key, grant.request_id, grant.scopes, used=0, seq=0
                )

    async def _request(
        self, grant: Grant, *, most: int, least: int, choices: Choices, used: int
    ) -> Verdict:
        tenant = grant.tenant.key
        scopes = grant.scopes
        try:
            for _ in range(len(scopes) + 1):
                verdict = await self._limiter.reserve(
                    tenant,
                    grant.request_id,
                    scopes,
                    most=most,
                    least=least,
                    used=used,
                    choices=choices,
                )
                refusal = verdict.refusal
                if refusal is None or refusal.limit != "unknown":
                    self._with_redis()
                    return verdict
                if not await self._spent.rebuild(tenant, scopes, refusal.scope):
                    break
            reason: object = UNCOUNTED
        except StoreUnavailable as failure:
            reason = failure
        self._without_redis(reason)
        if not self._is_open:
            raise errors.Unavailable("limits cannot be checked", code="limits_unavailable")
        grant.is_local = True
        return self._local.reserve(tenant, scopes, most=most, least=least, choices=choices)

    async def _settle(self, grant: Grant, record: UsageRecord) -> None:
        seq = await self._usage.stored(record, grant.recorded)
        if grant.is_local:
            unused = max(0, grant.granted - grant.used)
            self._local.settle(
                grant.tenant.key, grant.scopes, unused=unused, num_choices=grant.num_choices
            )
        try:
            await self._limiter.settle(
                grant.tenant.key, grant.request_id, grant.scopes, used=grant.used, seq=seq
            )
        except StoreUnavailable as failure:
            self._without_redis(failure)

    async def _renew(self) -> None:
        """Renews the reservations, also in a Redis that has lost them."""
        faults = FaultLog("reservation not renewed", STORE_FAILURES)
        while True:
            await asyncio.sleep(LEASE_MS / 4e3)
            for grant in list(self._grants):
                if grant not in self._grants:
                    # The request has ended meanwhile.
                    continue
                try:
                    await self._hold(grant, used=grant.used)
                except StoreUnavailable as failure:
                    self._without_redis(failure)
                    break
                except Exception as fault:
                    faults.add(fault)

    async def _let_lapse(self) -> None:
        """Gives back what gateways that died have reserved and not used."""
        async for left in self._usage.left():
            try:
                await self._limiter.lapse(
                    left.tenant, left.request_id, used=left.used, seq=left.seq
                )
            except STORE_FAILURES as failure:
                # The reservation expires in Redis, and the last reported number of used tokens
                # stays counted.
                structlog.get_logger().info(
                    "a reservation is left to its lease", reason=str(failure)
                )

    def _with_redis(self) -> None:
        if self._is_alone:
            self._is_alone = False
            self._local.forget()
            structlog.get_logger().info("limits are shared again")

    def _without_redis(self, reason: object) -> None:
        if not self._is_alone:
            self._is_alone = True
            structlog.get_logger().warning("limits are this gateway's alone", reason=str(reason))

    def _record(
        self, tenant: Tenant, model: str, grant: Grant, use: TokenUse, outcome: str, seconds: float
    ) -> UsageRecord:
        prompt_tokens = max(0, use.prompt_tokens - grant.charged_prompt_tokens)
        output_tokens = max(0, use.output_tokens - grant.charged_output_tokens)
        grant.used_before = prompt_tokens
        grant.num_output_tokens = output_tokens
        return UsageRecord(
            request_id=grant.request_id,
            tenant=tenant.key,
            key_id=tenant.key_id,
            model=model,
            at=round(time.time(), 3),
            prompts=use.num_prompts if prompt_tokens or not use.num_sent else 0,
            prompt_tokens=prompt_tokens,
            cached_tokens=use.cached_tokens if prompt_tokens else 0,
            output_tokens=output_tokens,
            seconds=round(seconds, 3),
            outcome=outcome,
            gateway=self.gateway_id,
        )
