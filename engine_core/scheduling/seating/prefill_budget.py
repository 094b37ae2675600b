"""Divides the prompt tokens of a step among tenants, so that no long prompt keeps others out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from ..table.request_state import BEGUN_ELSEWHERE, RequestState
from .tenant_shares import TenantShares, split

MIN_TOKENS = 256
"""Fewest prompt tokens of a bounded step: with fewer, prompts lose more time than decoding rows
gain."""
BESIDE_BEGUN_SECONDS = 0.05
"""Seconds of a step that other requests may use while the step recomputes an answer that has begun,
since its client waits in the middle of a sentence. Of several such answers the others do not delay
the first, and those that lack few tokens are recomputed at once."""
MIN_BESIDE_BEGUN = 16
"""Tokens of other requests that such a step may compute at least, however slow the model is."""
PROMPT_PART = 0.7
"""Part of the time between two tokens in which a step computes prompts, where requests have a goal
for it; the rest is for what decodes."""
BEGUN_STRETCH = 4
"""Resumed answers are ranked by deadline: arrival plus `BEGUN_STRETCH` times the time to recompute
the missing tokens. An answer that lacks few tokens overtakes one that lacks many, but not for
ever."""


class PrefillBudget:
    def __init__(
        self,
        shares: TenantShares,
        max_chunk: int,
        prefill_seconds: Callable[[], float],
        *,
        has_cache: bool = True,
    ) -> None:
        """`max_chunk`: most tokens of one request in a step; `prefill_seconds`: returns the seconds
        to compute a prompt token, 0 where unknown."""
        self._has_cache = has_cache
        self._shares = shares
        self._max_chunk = max_chunk
        self._prefill_seconds = prefill_seconds
        self.max_seconds = math.inf
        """Most seconds of a step that prompts are computed in, so that decoding rows do not wait
        long."""

    def of_step(self, budget: int, token_seconds: float = math.inf) -> int:
        """Prompt tokens that a step with `budget` tokens left may compute; `token_seconds`: time
        between two tokens that the decoding requests want."""
        max_seconds = min(self.max_seconds, PROMPT_PART * token_seconds)
        if max_seconds == math.inf:
            return budget
        seconds = self._prefill_seconds()
        bound = max(MIN_TOKENS, int(max_seconds / seconds)) if seconds else MIN_TOKENS
        return min(budget, bound)

    def of_prompt(self, budget: int, num_tokens: int, *, is_first: bool) -> int:
        """Tokens of a prompt that a step with this budget may compute. A model without a cache
        computes a text whole: one that does not fit behind others waits for the next step, whose
        first it is, and has that to itself if it is longer than the budget."""
        if self._has_cache:
            return budget
        return num_tokens if is_first or num_tokens <= budget else 0

    def beside_begun(self) -> int | None:
        """Tokens that all other requests may take of a step beside an answer that has begun and is
        computed again; None: as many as fit, since the time of a prompt token is not known yet."""
        seconds = self._prefill_seconds()
        return max(MIN_BESIDE_BEGUN, int(BESIDE_BEGUN_SECONDS / seconds)) if seconds else None

    def rank_begun(self, request: RequestState, num_lacking: int) -> None:
        """Ranks a resumed request that lacks `num_lacking` tokens among others of its kind; by
        arrival where the time of a token is not known."""
        tier, virtual_time, _ = request.rank
        if virtual_time == BEGUN_ELSEWHERE:
            seconds = num_lacking * self._prefill_seconds()
            request.rank = tier, virtual_time, request.added_at + BEGUN_STRETCH * seconds

    def parts(
        self, budget: int, prefilling: Iterable[RequestState], following: RequestState | None
    ) -> dict[str, int]:
        """Tokens by tenant, of those that prefill and of `following`, whose turn is next. Empty
        where no two share."""
        if not self._shares.are_several:
            return {}
        demands = Counter[str]()
        for request in prefilling:
            demands[request.tenant] += min(
                request.num_tokens - request.num_computed, self._max_chunk
            )
        if following is not None:
            demands[following.tenant] += min(following.num_uncached_tokens, self._max_chunk)
        parts = split(budget, demands, self._shares.weight)
        return {tenant: max(1, part) for tenant, part in parts.items()}
