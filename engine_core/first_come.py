"""How long requests of a queue would have waited in order of arrival.

A queue that is kept busy releases as many tokens in any order. So a request would have had its turn
once as many tokens were released as those before it had; where that is still to come, it is
foreseen from the speed of the releases so far.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WEIGHT = 0.1
"""Weight of the newest release in the mean time of a token."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A request of the queue."""

    num_tokens: int
    arrived_at: float
    mark: int
    """Tokens that go before it in order of arrival, counted from the queue's begin."""
    reached_at: float | None = None
    """Time at which as many tokens had been released as came before this request, so that a queue
    in order of arrival would have released it."""


class FirstComeFirstServed:
    """Takes every request that enters or leaves the queue. Requests are forgotten once order of
    arrival would have reached them, all of them when none waits."""

    def __init__(self) -> None:
        self._num_released = 0
        self._num_waiting = 0
        self._seconds_per_token = 0.0
        self._busy_since = 0.0
        self._unreached: deque[Arrival] = deque()

    def enter(self, num_tokens: int, now: float) -> Arrival:
        if not self._num_waiting:
            self._busy_since = now
        # At least one token, so that marks differ.
        num_tokens = max(1, num_tokens)
        arrival = Arrival(num_tokens, now, self._num_released + self._num_waiting)
        self._num_waiting += num_tokens
        self._unreached.append(arrival)
        return arrival

    def leave(self, arrival: Arrival, now: float, seconds_per_token: float = 0.0) -> float:
        """Takes a request out of the queue. Returns the seconds that it would have waited;
        `seconds_per_token`: what a released token takes at least."""
        self._learn(arrival.num_tokens, now)
        self._num_waiting -= arrival.num_tokens
        self._num_released += arrival.num_tokens
        while self._unreached and self._unreached[0].mark < self._num_released:
            self._unreached.popleft().reached_at = now
        if arrival.reached_at is not None:
            return arrival.reached_at - arrival.arrived_at
        num_left = arrival.mark - self._num_released
        return now - arrival.arrived_at + num_left * max(self._seconds_per_token, seconds_per_token)

    def _learn(self, num_tokens: int, now: float) -> None:
        seconds = (now - self._busy_since) / num_tokens
        self._busy_since = now
        self._seconds_per_token += WEIGHT * (seconds - self._seconds_per_token)
