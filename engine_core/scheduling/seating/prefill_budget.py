"""How many of a step's tokens prompts may have, and which part of them each tenant: no prompt keeps
others out by its length."""

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
"""A step computes others for so long at most while it computes again what is known of an answer
that has begun: its client waits in the middle of a sentence. Of several such answers the first is
not held up by the rest, and those that lack few tokens still get them at once."""
MIN_BESIDE_BEGUN = 16
"""Tokens of others that such a step may compute at least, so that they get on however slow the
model is."""
PROMPT_PART = 0.7
"""Part of the time between two tokens in which a step computes prompts, where requests have a goal
for it; the rest is for what decodes."""
BEGUN_STRETCH = 4
"""Answers that came here with a part go in the order in which they are due: an answer is due after
it came by so many times the time to compute what it lacks. One that lacks little overtakes one that
lacks much, but not for ever."""


class PrefillBudget:
    def __init__(
        self,
        shares: TenantShares,
        max_chunk: int,
        prefill_seconds: Callable[[], float],
        *,
        has_cache: bool = True,
    ) -> None:
        """`max_chunk`: the most tokens that one request gets a step; `prefill_seconds` says in
        which time a prompt token is computed, 0 where it is not known."""
        self._has_cache = has_cache
        self._shares = shares
        self._max_chunk = max_chunk
        self._prefill_seconds = prefill_seconds
        self.max_seconds = math.inf
        """Most seconds of a step that prompts are computed in, so that decoding rows do not wait
        long."""

    def of_step(self, budget: int, token_seconds: float = math.inf) -> int:
        """Prompt tokens that a step with so many tokens left may compute; `token_seconds`: time
        between two tokens that what decodes beside them wants."""
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
        """Ranks a request that came with a part of its answer, and lacks so many tokens, among
        others of its kind. Where it is not known how long a token takes, they are ranked by
        arrival."""
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
