"""How far a replica's column is believed: what its hits turned out to be, over what was
predicted."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of the newest outcome."""
FLOOR = 0.05
"""A replica keeps a little belief, so that it is tried again and can win the rest back."""
DOUBT = 0.7
"""Trust below which a metric counts the replica as distrusted."""


class Trust:
    """An exponentially weighted mean of min(1, actual / predicted); begins at 1."""

    def __init__(self) -> None:
        self.value = 1.0

    @property
    def is_doubted(self) -> bool:
        return self.value < DOUBT

    def observe(self, predicted: int, actual: int) -> None:
        """Takes the outcome of one prefill, in tokens. Where nothing was predicted nothing is
        learned."""
        if predicted > 0:
            outcome = min(1.0, actual / predicted)
            self.value = max(FLOOR, (1 - WEIGHT) * self.value + WEIGHT * outcome)
