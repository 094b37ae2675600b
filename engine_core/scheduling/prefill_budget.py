"""How many of a step's tokens prompts may have, and which part of them each tenant: no prompt keeps others out by its
length."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from .request_state import RequestState
from .tenant_shares import TenantShares, split


class PrefillBudget:
    def __init__(self, shares: TenantShares, max_chunk: int) -> None:
        """`max_chunk`: the most tokens that one request gets a step."""
        self._shares, self._max_chunk = shares, max_chunk
        self.max_tokens = sys.maxsize
        """Prompt tokens of a step at most, so that what decodes beside them does not wait for long."""

    def parts(self, budget: int, prefilling: Iterable[RequestState], following: RequestState | None) -> dict[str, int]:
        """Tokens by tenant, of those that prefill and of `following`, whose turn is next. Empty where no two share."""
        if not self._shares.are_several:
            return {}
        demands = Counter[str]()
        for request in prefilling:
            demands[request.tenant] += min(request.num_tokens - request.num_computed, self._max_chunk)
        if following is not None:
            demands[following.tenant] += min(following.num_uncached_tokens, self._max_chunk)
        parts = split(budget, demands, self._shares.weight)
        return {tenant: max(1, part) for tenant, part in parts.items()}
