"""Ranks requests by the policies of their tiers, from what is known about each, and keeps the
accounts that this takes: virtual times of tenants, and the order of arrival.

Knows nothing about the queue, seats or blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from ...first_come import FirstComeFirstServed
from ...queue_policies import DEFAULT_SECONDS_PER_TOKEN, PROMOTION_SECONDS, Facts, Policies, Policy
from ...tenant_turns import TenantTurns
from ..rows.rows import Rows
from ..table.request_state import BEGUN_ELSEWHERE, NO_ROW, RequestState
from .waiting_queue import rise_a_tier

COST_PROMPT = 1.0
COST_ANSWER = 2.0
"""Cost of a prompt token and of a token of an answer in the virtual time of a tenant, as gateways
charge them."""


class Ranking:
    def __init__(
        self,
        policies_text: str,
        rows: Rows,
        clock: Callable[[], float],
        prefill_seconds: Callable[[], float],
    ) -> None:
        """`policies_text`: see `Policies.of`; `prefill_seconds`: time in which a prompt token is
        computed, 0 where it is not known."""
        self.policies_text = policies_text
        self.policies = policies = Policies.of(policies_text)
        self._rows = rows
        self._clock = clock
        self._prefill_seconds = prefill_seconds
        self._turns = TenantTurns()
        self._first_come = FirstComeFirstServed()
        self.promotes = any(policy.promotes for policy in policies.all)
        """Whether waiting makes a request go on at another level."""
        self.refuses = any(policy.refuses for policy in policies.all)
        self.overtakes = any(policy.overtakes for policy in policies.all)

    @property
    def seconds_per_token(self) -> float:
        """Time of a prompt token; a default while it is not known."""
        return self._prefill_seconds() or DEFAULT_SECONDS_PER_TOKEN

    def policy_of(self, request: RequestState) -> Policy:
        return self.policies.of_tier(request.tier)

    def enter(self, request: RequestState) -> None:
        """Ranks a request that comes into the queue, for the first time or again."""
        if request.scheduled_at is None:
            request.num_first_uncached = request.num_uncached_tokens
            request.in_order_of_arrival = self._first_come.enter(
                request.num_uncached_tokens, request.added_at
            )
            request.waits_since = request.added_at
        else:
            request.waits_since = self._clock()
        self._turns.enter(request.tenant, request.virtual_time, self._cost(request))
        self.rank(request)

    def leave(self, request: RequestState) -> None:
        """Notes that a request has left the queue; `note_seated` is to follow."""
        self._turns.leave(request.tenant, self._cost(request))

    def end(self, request: RequestState) -> None:
        """Notes that a waiting request has ended."""
        self.leave(request)
        if request.in_order_of_arrival is not None:
            self._first_come.leave(request.in_order_of_arrival, self._clock())

    def note_seated(self, request: RequestState) -> None:
        """Notes how long a request would have waited for its first row in order of arrival."""
        if request.in_order_of_arrival is not None:
            request.fcfs_queue_seconds = self._first_come.leave(
                request.in_order_of_arrival, request.seated_at, self.seconds_per_token
            )
            request.in_order_of_arrival = None

    def turn_of(self, request: RequestState) -> float:
        """Virtual time of a tenant's turn, where its requests are not in the order of theirs."""
        if self.policy_of(request).orders_tenants:
            return 0.0
        return self._turns.virtual_time(request.tenant)

    def rank(self, request: RequestState) -> None:
        """Sets the rank of a request by what is known about it now. Under each policy a resumed
        request precedes others of its tier."""
        tier = self.policies.tier(request.tier)
        if request.rank[1] == BEGUN_ELSEWHERE:
            request.rank = (tier, *request.rank[1:])
        else:
            request.rank = (tier, self.key(request), request.arrival)

    def key(self, request: RequestState) -> float:
        """The policy's key of a waiting or running request, as of now."""
        return self.policy_of(request).key(self.facts(request))

    def facts(self, request: RequestState) -> Facts:
        num_known = request.num_tokens
        num_to_compute = request.num_uncached_tokens
        if request.row != NO_ROW:
            table = self._rows.table
            num_known = int(table.num_known[request.row])
            is_prefilling = request.key in self._rows.prefilling
            num_to_compute = request.num_tokens - request.num_computed if is_prefilling else 0
        num_answered = num_known - request.num_prompt_tokens
        return Facts(
            arrived_at=request.arrived_at,
            virtual_time=request.virtual_time,
            num_prompt_tokens=num_to_compute,
            num_answer_tokens=_rest_of_answer(request, num_answered),
            num_level=request.num_first_uncached + num_answered - request.num_forgotten,
            seconds_per_token=self.seconds_per_token,
            first_token_by=request.first_token_by,
        )

    def _cost(self, request: RequestState) -> float:
        """Predicted cost of the request in its tenant's virtual time."""
        tokens = COST_PROMPT * request.num_first_uncached
        return (tokens + COST_ANSWER * request.num_expected_tokens) / request.weight

    def promote(self, request: RequestState, now: float) -> bool:
        """Moves up a waiting request that has waited for long. Whether its rank has changed."""
        if rise_a_tier(request, now):
            request.tier -= 1
        elif self.policy_of(request).promotes and self._has_waited(request, now):
            request.num_forgotten += self.facts(request).num_level
            request.waits_since = now
        else:
            return False
        self.rank(request)
        return True

    def _has_waited(self, request: RequestState, now: float) -> bool:
        return request.rank[1] > 0 and now - request.waits_since >= PROMOTION_SECONDS


def _rest_of_answer(request: RequestState, num_answered: int) -> float:
    """Number of tokens expected after `num_answered` of an answer. One longer than predicted is
    expected to grow by half of its length: the longer an answer is, the longer it goes on."""
    most = request.max_len - request.num_prompt_tokens - num_answered
    return min(most, max(request.num_expected_tokens - num_answered, num_answered / 2))
