"""Tokens that requests found cached when they took a row: at first admission, and after a
preemption.

Knows requests and counts; knows nothing about blocks or where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...kv.peer_blocks import PeerBlocks
from ...kv.prefix_cache import PrefixCache
from ..table.request_state import RequestState
from .prefetched_blocks import PrefetchedBlocks

WEIGHT = 0.05
"""Weight of the newest prompt in a mean over prompts."""


class PrefixHits:
    """Counts of tokens, so far."""

    def __init__(
        self, cache: PrefixCache, prefetched: PrefetchedBlocks, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._prefetched = prefetched
        self._clock = clock
        self.seconds_per_token = 0.0
        """How long a hit token of the last prompts took to be there, without pulls; 0 where the
        device had them all."""
        self.num_resumed_kept = 0
        """Known tokens of preempted requests that were seated again, whose blocks the device still
        had."""
        self.num_resumed_loaded = 0
        """Tokens of resumed requests that a block source brought back."""
        self.num_resumed_computed = 0
        """Tokens of resumed requests that are computed again."""

    def note_waits(self, request: RequestState) -> None:
        """Notes that a request waits for a block source from now on."""
        request.load_began = self._clock()

    def note_loaded(self, request: RequestState, tier: str, num_tokens: int) -> None:
        """Notes that the wait is over: a source of this tier brought so many tokens."""
        request.num_loaded_tokens[tier] += num_tokens
        # Pulls have a speed of their own: what is pulled was no hit of this engine's caches.
        if tier != PeerBlocks.tier:
            request.load_seconds += self._clock() - request.load_began

    def note_seated(self, request: RequestState) -> None:
        """Notes that a request got a row at `seated_at`, with its first `num_computed` tokens
        cached."""
        num_hit_tokens = request.num_computed
        if request.scheduled_at is None:
            request.scheduled_at = request.seated_at
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            request.num_loaded_tokens[PeerBlocks.tier] += self._prefetched.take(
                request.chain.hashes[: request.chain.num_cached]
            )
            request.num_cached_by_tier = _at_most(
                request.num_cached_tokens, request.num_loaded_tokens
            )
            self._cache.count(
                request.num_prompt_tokens, request.num_cached_tokens, request.num_cached_by_tier
            )
            self._learn(request)
        else:
            num_loaded = min(request.num_loaded_tokens.total(), num_hit_tokens)
            self.num_resumed_loaded += num_loaded
            self.num_resumed_kept += num_hit_tokens - num_loaded
            self.num_resumed_computed += request.num_tokens - num_hit_tokens
        request.num_loaded_tokens.clear()
        request.load_seconds = 0.0

    def _learn(self, request: RequestState) -> None:
        if request.num_cached_tokens:
            seconds = request.load_seconds / request.num_cached_tokens
            self.seconds_per_token += WEIGHT * (seconds - self.seconds_per_token)


def _at_most(total: int, num_tokens: Mapping[str, int]) -> dict[str, int]:
    """Counts by tier whose sum is `total` at most: what was loaded may have been evicted before it
    was hit."""
    found = {}
    for tier, count in num_tokens.items():
        if (part := min(count, total)) > 0:
            found[tier] = part
            total -= part
    return found
