"""Whether a prompt is computed at one replica and its answer at another: what that adds to the costs of either.

Replicas have roles, which change at any time. A role is a preference: where none of the right role is left, another
one does all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headwater.services.runtime.role import DECODE, PREFILL

from .cost import Parts
from .decision import Candidate
from .rates import Rates
from .replica import Replica

MISPLACED = "prefill"
"""Guard of a replica that computes prompts, for an answer that has begun."""
UNABLE = ("failed", "failing", "draining", "inexact")
"""Guards of candidates that no answer goes on at."""


class Splitting:
    """The roles of a model's replicas, for one decision."""

    def __init__(self, replicas: Iterable[Replica], *, has_begun: bool) -> None:
        serving = [each for each in replicas if not each.is_draining]
        self._has_begun = has_begun
        # An engine that cannot pull would compute the prompt again.
        self._others = [each for each in serving if each.role != PREFILL and each.can_pull]
        self._is_split = bool(self._others) and any(each.role == PREFILL for each in serving)

    def with_costs(self, replica: Replica, parts: Parts, num_tokens: int, rates: Rates) -> Parts:
        """The parts of a candidate's cost with what its role adds."""
        if not self._is_split or self._has_begun:
            return parts
        if replica.role == PREFILL:
            pulled = min(each.seconds_per_pulled_token(rates) for each in self._others)
            return parts._replace(hand_over=num_tokens * pulled)
        if replica.role == DECODE:
            return parts._replace(stall=parts.own * replica.load.reported.num_running)
        return parts

    def guard(self, replica: Replica) -> str:
        return MISPLACED if self._has_begun and self._is_split and replica.role == PREFILL else ""

    def hands_over(self, chosen: Replica, seen: Collection[Candidate]) -> bool:
        """Whether another replica can go on with what the chosen one begins."""
        others = {
            each.member.replica_id for each in self._others if each.member.numerics_id == chosen.member.numerics_id
        }
        is_able = any(each.replica_id in others and each.guard not in UNABLE for each in seen)
        return chosen.role == PREFILL and not self._has_begun and is_able
