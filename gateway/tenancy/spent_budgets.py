"""Counts what was spent of budgets anew, from usage records, where Redis has lost it."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence

import structlog

from headwater.services.runtime.usage_log import UsageLog, UsageRecord

from ..buckets import FAILURES
from .limiter import Limiter, period_of
from .records import Scope

REBUILD_SECONDS = 5.0
"""Seconds to count a scope's records again. A request waits for the count once."""


class SpentBudgets:
    def __init__(self, limiter: Limiter, usage: UsageLog) -> None:
        self._limiter = limiter
        self._usage = usage
        self._rebuilding: dict[tuple[str, str], asyncio.Task[bool]] = {}
        """Counts under way, by tenant and name of the scope."""

    async def rebuild(self, tenant: str, scopes: Sequence[Scope], name: str) -> bool:
        """Counts what a scope has spent, once for all requests that wait. Returns False where that
        cannot be found out."""
        scope = next(scope for scope in scopes if scope.name == name)
        key = (tenant, name)
        if key not in self._rebuilding:
            task = self._rebuilding[key] = asyncio.create_task(self._count(tenant, scope))
            task.add_done_callback(lambda _: self._rebuilding.pop(key, None))
        return await asyncio.shield(self._rebuilding[key])

    async def _count(self, tenant: str, scope: Scope) -> bool:
        began = await self._limiter.begin_rebuild(tenant, scope)
        since, _ = period_of(scope.limits.budget_period, datetime.datetime.now(datetime.UTC))
        used = last = 0
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                async for seq, record in self._usage.read(tenant, since):
                    last = seq
                    used += record.num_tokens if _is_within(scope, record) else 0
        except FAILURES as failure:
            structlog.get_logger().warning(
                "usage cannot be counted", tenant=tenant, error=repr(failure)
            )
            return False
        await self._limiter.end_rebuild(tenant, scope, began=began, used=used, seq=last)
        return True


def _is_within(scope: Scope, record: UsageRecord) -> bool:
    kind, _, name = scope.name.partition(" ")
    return {"tenant": True, "key": record.key_id == name, "model": record.model == name}[kind]
