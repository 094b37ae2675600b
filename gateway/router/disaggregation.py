"""Whether a prompt is computed at one replica and its answer at another: what that adds to the
costs of either.

Replicas have roles, which change at any time. A role is a preference: where none of the right role
is left, another one does all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from headwater.services.runtime.member import Member
from headwater.services.runtime.role import DECODE, PREFILL

from .cost import Parts
from .decision import Candidate
from .policy import SPREAD, load_only
from .rates import Rates
from .replica import Replica

MISPLACED = "prefill"
"""Guard against a prefill replica, for an answer whose prompt another one has computed and
lends."""
STALL_WEIGHT = 0.1
"""Seconds of waiting for a first token that weigh as much as one second by which a running answer
is delayed. So few, because a decode engine bounds the prompts of a step: the answer's tokens still
come faster than anyone reads."""
UNABLE = ("failed", "failing", "draining", "asleep", "inexact")
"""Guards of candidates that no answer goes on at."""


class Disaggregation:
    """The roles of a model's replicas, for one decision."""

    def __init__(self, replicas: Iterable[Replica], *, is_lent: bool) -> None:
        """`is_lent`: the answer has begun, and a replica lends what was computed of it. An answer
        that has begun and is lost is computed as a prompt is."""
        serving = [each for each in replicas if not each.is_away]
        self._is_lent = is_lent
        # An engine that cannot pull would compute the prompt again.
        self._others = [each for each in serving if each.role != PREFILL and each.can_pull]
        self._is_split = bool(self._others) and any(each.role == PREFILL for each in serving)

    def with_costs(self, replica: Replica, parts: Parts, num_tokens: int, rates: Rates) -> Parts:
        """The parts of a candidate's cost, with those that its role adds."""
        if not self._is_split or self._is_lent:
            return parts
        if replica.role == PREFILL:
            return replace(
                parts, hand_over=self._hand_over_seconds(replica, parts, num_tokens, rates)
            )
        if replica.role == DECODE:
            return replace(
                parts, stall=STALL_WEIGHT * parts.own * replica.load.reported.num_running
            )
        return parts

    def _hand_over_seconds(
        self, replica: Replica, parts: Parts, num_tokens: int, rates: Rates
    ) -> float:
        """Seconds that a hand-over adds. Blocks are pulled while later chunks are prefilled; blocks
        of the last chunk are pulled after it. Then the other replica computes one step more than
        the chosen one would have."""
        pulled = min(each.seconds_per_pulled_token(rates) for each in self._others)
        num_left = min(num_tokens, replica.load.reported.max_chunk_tokens or num_tokens)
        return max(num_left * pulled, num_tokens * pulled - parts.own) + parts.slow

    def guard(self, replica: Replica) -> str:
        return MISPLACED if self._is_lent and self._is_split and replica.role == PREFILL else ""

    def successor(
        self, chosen: Replica, seen: Collection[Candidate], num_tokens: int, rates: Rates
    ) -> Member | None:
        """The replica that would continue soonest what the chosen replica prefills, by present
        loads; None if the chosen replica keeps the request. Of nearly equal replicas, the one with
        the fewest requests."""
        if chosen.role != PREFILL or self._is_lent:
            return None
        others = {
            each.member.replica_id: each
            for each in self._others
            if each.member.numerics_id == chosen.member.numerics_id
        }
        costs = {
            each.replica_id: load_only(each.parts)
            + _pull_seconds(others[each.replica_id], each, num_tokens, rates)
            for each in seen
            if each.replica_id in others and each.guard not in UNABLE
        }
        limit = min(costs.values(), default=0.0) * (1 + SPREAD)
        best = [others[replica_id] for replica_id, cost in costs.items() if cost <= limit]
        found = min(best, key=lambda each: each.load.num_requests + each.num_expected, default=None)
        return found.member if found is not None else None


def _pull_seconds(replica: Replica, seen: Candidate, num_tokens: int, rates: Rates) -> float:
    return max(0, num_tokens - seen.parts.matched_tokens) * replica.seconds_per_pulled_token(rates)
