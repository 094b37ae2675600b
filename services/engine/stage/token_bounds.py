"""Tokens that a request's sampling settings exclude in addition to its grammar. Masks contain them,
so that an empty mask is noticed before a token is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwater.engine_core.sampling_params import SamplingParams

from ..core.mask_table import Int32Array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenBounds:
    """Bounds of one request. Masks are int32 [words]."""

    allowed: Int32Array
    """Tokens that are always allowed: the listed ones, without bad words of one token."""
    bad_words: tuple[tuple[int, ...], ...]
    """Bad words of several tokens."""
    stops: Int32Array
    """Tokens that end the answer."""
    min_tokens: int
    blocked: Int32Array
    """Tokens that do not come before `min_tokens`, as long as there are others."""

    @property
    def num_looked_at(self) -> int:
        """Number of the last tokens of an answer that matter."""
        return max((len(word) - 1 for word in self.bad_words), default=0)

    def restrict(self, mask: Int32Array, last_ids: Sequence[int], output_index: int) -> None:
        """Removes tokens from the mask of output `output_index` that are not allowed after
        `last_ids`. The end of the answer stays allowed where the grammar allows it and no other
        token is left."""
        left = mask & self.allowed
        for *beginning, end in self.bad_words:
            if list(last_ids[len(last_ids) - len(beginning) :]) == beginning:
                left &= ~_words([end], len(mask))
        if output_index < self.min_tokens and (going_on := left & ~self.blocked).any():
            left = going_on
        mask &= left if left.any() else self.stops


def bounds_of(sampling: SamplingParams, num_words: int) -> TokenBounds | None:
    """Bounds of a request; None: tokens come as its grammar has them."""
    if sampling == without_bounds(sampling):
        return None
    allowed = ~_words((word[0] for word in sampling.bad_words if len(word) == 1), num_words)
    if sampling.allowed_token_ids:
        allowed &= _words(sampling.allowed_token_ids, num_words)
    return TokenBounds(
        allowed=allowed,
        bad_words=tuple(word for word in sampling.bad_words if len(word) > 1),
        stops=_words(sampling.stop_token_ids, num_words),
        min_tokens=sampling.min_tokens,
        blocked=_words(sampling.min_tokens_blocked_ids, num_words),
    )


def without_bounds(sampling: SamplingParams) -> SamplingParams:
    """Sampling that the core gets of a request whose masks have the bounds. NOTE: edits of logits
    would forbid stop tokens also where the grammar allows nothing else."""
    return replace(sampling, allowed_token_ids=(), bad_words=(), min_tokens_blocked_ids=())


def _words(token_ids: Iterable[int], num_words: int) -> Int32Array:
    """A mask of these tokens."""
    is_in = np.zeros(32 * num_words, np.bool_)
    is_in[list(token_ids)] = True
    words: Int32Array = np.packbits(is_in, bitorder="little").view(np.int32)
    return words
