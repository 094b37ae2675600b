"""How long blocks take from a place whose speed is not constant: what was measured at the start,
and loads since."""

from __future__ import annotations

from collections.abc import Callable

from .block_source import LoadEnd, Outcome, Ticket

WEIGHT = 0.25
"""Weight of the newest load in the mean."""
HALF_LIFE_SECONDS = 30.0
"""Time in which a mean above the first measurement fades half the way back: a source that was slow
is tried again."""


class ReadCosts:
    """Costs of loads. Loads overlap, so each is timed from the end of the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._assumed = self._mean = 0.0
        self._noted_at = self._last_end = 0.0
        self._begins: dict[Ticket, float] = {}

    @property
    def seconds_per_block(self) -> float:
        above = self._mean - self._assumed
        if above <= 0:
            return self._mean
        fading: float = 0.5 ** ((self._clock() - self._noted_at) / HALF_LIFE_SECONDS)
        return self._assumed + above * fading

    def assume(self, seconds_per_block: float) -> None:
        """Takes the time a block that a measurement at the start found."""
        self._assumed = self._mean = seconds_per_block

    def begin(self, ticket: Ticket) -> None:
        self._begins[ticket] = self._clock()

    def end(self, end: LoadEnd) -> None:
        """Notes a load that ended. A cancelled one took longer than predicted; a failed one is not
        counted."""
        begun = self._begins[end.ticket]
        last_end = self._last_end
        self.forget(end.ticket)
        if end.outcome is Outcome.CANCELLED:
            self._note(self._last_end - begun, len(end.ticket.hashes))
        elif end.num_usable:
            self._note(self._last_end - max(begun, last_end), end.num_usable)

    def forget(self, ticket: Ticket) -> None:
        """Forgets a load whose time is not representative."""
        del self._begins[ticket]
        self._last_end = self._clock()

    def _note(self, seconds: float, num_blocks: int) -> None:
        self._mean = self.seconds_per_block + WEIGHT * (
            seconds / num_blocks - self.seconds_per_block
        )
        self._noted_at = self._last_end
