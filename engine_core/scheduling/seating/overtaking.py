"""Chooses running requests whose seats or blocks go to waiting requests of the same tenant, where
the policy puts these first by more than it costs to come back.

Only names them, one at a time; the scheduler preempts each before it asks for the next. What a
preempted request had computed is loaded or computed again, whichever takes less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...queue_policies import never
from ..blocks.blocks import Blocks
from ..rows.rows import Rows
from ..table.request_state import RequestState
from .ranking import Ranking
from .waiting_queue import WaitingQueue
from .yielding import Yielding

PAUSE_SECONDS = 0.05
"""Time between two looks at all running requests that find none: a step has no time for it."""


class Overtaking:
    def __init__(
        self,
        waiting: WaitingQueue,
        ranking: Ranking,
        yielding: Yielding,
        rows: Rows,
        blocks: Blocks,
        clock: Callable[[], float],
    ) -> None:
        self._waiting = waiting
        self._ranking = ranking
        self._yielding = yielding
        self._rows = rows
        self._blocks = blocks
        self._clock = clock
        self._look_at = 0.0

    def victims(self) -> Iterator[RequestState]:
        """Running requests that may be preempted for the request whose turn is next."""
        following = self._waiting.peek()
        if following is None or self._ranking.policy_of(following).preempts is never:
            return
        if (now := self._clock()) < self._look_at:
            return
        while self._yielding.lacks_room_for(following):
            if (victim := self._last_behind(following)) is None:
                self._look_at = now + PAUSE_SECONDS
                return
            yield victim

    def goes_before(self, request: RequestState, other: RequestState) -> bool:
        """Whether a waiting request has its prompt computed before that of `other`."""
        return (
            request.tenant == other.tenant
            and self._ranking.policy_of(request).overtakes
            and request.rank < other.rank
        )

    def _last_behind(self, following: RequestState) -> RequestState | None:
        """The running request of the tenant that is last by the policy, if its seat is worth it."""
        ranking = self._ranking
        own = [
            (ranking.key(each), each.key, each)
            for each in self._rows.running.values()
            if each.tenant == following.tenant and each.tier == following.tier
        ]
        if not own:
            return None
        key, _, last = max(own)
        resume_seconds = self._blocks.resume_seconds(last, ranking.seconds_per_token)
        preempts = ranking.policy_of(following).preempts
        return last if preempts(ranking.key(following), key, resume_seconds) else None
