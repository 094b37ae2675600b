"""Predicts how many tokens an answer will have: a running quantile of the answers before it, by
tenant and endpoint.

Memory is bounded, and old answers fade. Knows nothing about what was asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

FIRST_PREDICTION = 128
"""Tokens of an answer where no answer has been seen."""
QUANTILE = 0.5
LEAST_SEEN = 4
"""Number of answers from which on a tenant's own lengths are used; before, the lengths of all
tenants at the endpoint are."""
FADING = 1.02
"""Weight of an answer, relative to the one before it: the last fifty or so decide."""
MAX_KEYS = 4096
"""Pairs of tenant and endpoint that are remembered; those used last."""
BOUNDS = tuple(round(2 ** (each / 4)) for each in range(72))
"""Upper ends of the counted ranges, in tokens: a prediction is at most a fifth too high."""
_LARGEST_WEIGHT = 1e12
EVERY_TENANT = ""


class RunningQuantile:
    """Counts of lengths by range, the latest weighing most."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._weights = [0.0] * len(BOUNDS)
        self._total = 0.0
        self._next_weight = 1.0

    def add(self, length: int) -> None:
        idx = min(bisect_left(BOUNDS, length), len(BOUNDS) - 1)
        self._weights[idx] += self._next_weight
        self._total += self._next_weight
        self._next_weight *= FADING
        self.num_seen += 1
        if self._next_weight > _LARGEST_WEIGHT:
            self._scale(1 / self._next_weight)

    def value(self, quantile: float) -> int:
        """Length that this part of the answers does not exceed. At least one was added."""
        left = quantile * self._total
        for weight, bound in zip(self._weights, BOUNDS, strict=True):
            left -= weight
            if left <= 0:
                return bound
        return BOUNDS[-1]

    def _scale(self, factor: float) -> None:
        self._weights = [weight * factor for weight in self._weights]
        self._total *= factor
        self._next_weight *= factor


class AnswerLengths:
    """Answers so far, by tenant and endpoint."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lengths: OrderedDict[tuple[str, str], RunningQuantile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, tenant: str, endpoint: str, num_tokens: int) -> None:
        """Takes the length of an answer that has ended."""
        for key in ((tenant, endpoint), (EVERY_TENANT, endpoint)):
            lengths = self._lengths.get(key)
            if lengths is None:
                lengths = self._lengths[key] = RunningQuantile()
            lengths.add(num_tokens)
            self._lengths.move_to_end(key)
        while len(self._lengths) > self._max_keys:
            self._lengths.popitem(last=False)

    def predict(self, tenant: str, endpoint: str, max_tokens: int, hint: int = 0) -> int:
        """Predicted number of tokens of an answer; `hint`: the number that its client expects, 0:
        none."""
        if hint:
            return min(hint, max_tokens)
        own = self._lengths.get((tenant, endpoint))
        if own is None or own.num_seen < LEAST_SEEN:
            own = self._lengths.get((EVERY_TENANT, endpoint))
        known = own.value(QUANTILE) if own is not None else FIRST_PREDICTION
        return min(known, max_tokens)
