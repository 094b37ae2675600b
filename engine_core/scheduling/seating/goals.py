"""Keeps requests to their goals, under a policy that does so: finds waiting ones to refuse, so that
the first tokens of the others come in time, and the time between tokens that running ones want.

Only names requests; the engine ends them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...refusals import Due, refusals
from ..rows.rows import Rows
from ..table.request_state import RequestState
from .prefill_budget import PROMPT_PART
from .ranking import Ranking
from .waiting_queue import WaitingQueue

LOOK_SECONDS = 0.02
"""Seconds between two looks at all waiting requests."""


class Late(NamedTuple):
    """A request to refuse."""

    request: RequestState
    seconds: float
    """Time by which a first token would be late without the refusal."""


class Goals:
    def __init__(
        self, waiting: WaitingQueue, ranking: Ranking, rows: Rows, clock: Callable[[], float]
    ) -> None:
        self._waiting = waiting
        self._ranking = ranking
        self._rows = rows
        self._clock = clock
        self._look_at = 0.0

    @property
    def token_seconds(self) -> float:
        """The shortest time between two tokens that a running request wants; infinite where none
        wants any."""
        if not self._ranking.refuses:
            return math.inf
        goals = (each.token_seconds for each in self._rows.running.values())
        return min((goal for goal in goals if goal), default=math.inf)

    def late(self) -> list[Late]:
        """Waiting requests to refuse."""
        if not self._ranking.refuses or not len(self._waiting):
            return []
        if (now := self._clock()) < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        seconds_per_token = self._ranking.seconds_per_token
        if self.token_seconds < math.inf:
            # Decode steps take the rest of the time.
            seconds_per_token /= PROMPT_PART
        begin = now + self._rows.num_prefill_tokens * seconds_per_token
        return [Late(*each) for each in refusals(self._queue(seconds_per_token), begin)]

    def _queue(self, seconds_per_token: float) -> Iterator[tuple[Due, RequestState]]:
        for request in self._waiting.in_order():
            seconds = request.num_uncached_tokens * seconds_per_token
            yield Due(request.first_token_by, seconds, self._may_refuse(request)), request

    def _may_refuse(self, request: RequestState) -> bool:
        """Whether the request may still be refused: one whose first token may have been sent goes
        on."""
        return (
            self._ranking.policy_of(request).refuses
            and request.first_token_by < math.inf
            and request.scheduled_at is None
            and not request.has_begun
        )
