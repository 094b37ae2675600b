"""Tenants that have used up their requests of the minute, refused before anything of a request is
read.

A minute's requests do not come back before their time, so a refusal here is the one that Redis
would give. It stands for a second at most: limits may be raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .grant import Standing, refused
from .limiter import Refusal, Verdict
from .tenants import Tenant

KEPT_SECONDS = 1.0
MAX_KEPT = 10_000


class ExhaustedLimits:
    """Refusals by tenant and key. A limit of one model refuses none here: the model is not known
    yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: dict[tuple[str, str], tuple[float, Verdict]] = {}
        """Refusals with their times."""

    def note(self, tenant: Tenant, verdict: Verdict) -> None:
        """Notes the verdict on a request of the tenant."""
        refusal = verdict.refusal
        if (
            refusal is not None
            and refusal.limit == "requests"
            and not refusal.scope.startswith("model ")
        ):
            if len(self._refusals) >= MAX_KEPT:
                self._refusals.clear()
            self._refusals[tenant.key, tenant.key_id] = self._clock(), verdict

    def reject_early(self, tenant: Tenant, standing: Standing) -> None:
        """Raises `LimitExceeded` for a tenant whose refusal stands."""
        if (known := self._refusals.get((tenant.key, tenant.key_id))) is None:
            return
        (made_at, verdict), refusal = known, known[1].refusal
        age = self._clock() - made_at
        if refusal is None or age >= min(KEPT_SECONDS, refusal.seconds):
            del self._refusals[tenant.key, tenant.key_id]
            return
        standing.requests = verdict.requests
        standing.tokens = verdict.tokens
        raise refused(Refusal(refusal.scope, refusal.limit, refusal.seconds - age), tenant.id)
