"""Prompts that wait for room, rather than evict blocks of conversations that are expected back.

Where conversations need more memory than there is, each prompt that is computed anew evicts another
one's blocks, and that one is computed anew next. A prompt that waits leaves the others theirs. None
waits where prompts take little of the time: computing them anew delays hardly anybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..blocks.blocks import Blocks
from ..blocks.wanted import Wanted
from ..rows.rows import Rows
from ..table.request_state import RequestState
from .preemption import Preemption
from .waiting_queue import WaitingQueue

MOST_SECONDS = 4.0
"""Time after which a prompt waits no longer."""
LEAST_LOSS_SECONDS = 0.05
"""Least time of computing again what a prompt evicts for which it waits: short prompts never do."""
RECENT_SECONDS = 5.0
"""Time constant of the share of time in which prompts were computed."""
BUSY = 0.2
"""Least such share at which prompts wait. Of 0, 0.2 and 0.4, 0 delays prompts of engines with few
misses and 0.4 lets a cache thrash (headwater bench agents, 2026-11-30)."""


class EvictionWaits:
    """Requests that wait are set aside in the queue: others pass them until blocks come free."""

    def __init__(
        self,
        waiting: WaitingQueue,
        rows: Rows,
        blocks: Blocks,
        preemption: Preemption,
        clock: Callable[[], float],
        prefill_seconds: Callable[[], float],
        *,
        are_allowed: bool,
    ) -> None:
        self._are_allowed = are_allowed
        self._waiting = waiting
        self._rows = rows
        self._blocks = blocks
        self._preemption = preemption
        self._clock = clock
        self._prefill_seconds = prefill_seconds
        self._due = math.inf
        """Time at which a wait ends, at the latest."""
        self._share = 0.0
        """Share of time in which prompts were computed, at `_shared_at`."""
        self._shared_at = 0.0

    def are_worth_it(self, request: RequestState, wanted: Wanted) -> bool:
        """Whether a request had better wait than take its blocks now."""
        if not self._are_allowed or self._recent_share() < BUSY:
            return False
        has_waited = self._clock() >= request.added_at + MOST_SECONDS
        if request.has_begun or has_waited or not self._are_releases_due:
            return False
        loss = self._blocks.eviction_loss(request, wanted) * self._prefill_seconds()
        return loss >= LEAST_LOSS_SECONDS

    def note_seated(self, num_tokens: int) -> None:
        """Notes that so many tokens of a prompt are to be computed."""
        if not self._are_allowed:
            return
        self._share = self._recent_share() + num_tokens * self._prefill_seconds() / RECENT_SECONDS
        self._shared_at = self._clock()

    def begin(self, request: RequestState) -> None:
        """Sets a request aside."""
        self._due = min(self._due, request.added_at + MOST_SECONDS)
        self._waiting.set_aside(request)

    def end(self) -> None:
        """Brings requests back once one of them has waited for long enough."""
        if self._due < math.inf and self._clock() >= self._due:
            self._due = math.inf
            self._waiting.bring_back()

    def _recent_share(self) -> float:
        return self._share * math.exp((self._shared_at - self._clock()) / RECENT_SECONDS)

    @property
    def _are_releases_due(self) -> bool:
        """Whether a running request goes on, so that blocks come free and steps are planned."""
        return bool(self._rows.running) and self._preemption.first_stalled() is None
