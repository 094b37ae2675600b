"""Order in which requests run: which of those that wait is next, how much of a step each gets, and
which running one gives way.

Policy only: the scheduler seats and preempts the requests that are named here. An order by name is
a rank and an expression over ranks, shares and credit. Knows nothing about steps in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ...config import EngineConfig
from ...kv.block_source import Ticket
from ...queue_policies import BLOCKED_SECONDS
from ...step_output import MAX_TENANTS, EngineLoad
from ..blocks.blocks import Blocks, Wait
from ..blocks.forks import Follow
from ..blocks.wanted import Wanted
from ..rows.rows import Rows
from ..step_builder import StepBuilder
from ..table.request_state import NO_ROW, RequestState
from .adapter_slots import NO_DIGEST
from .eviction_waits import EvictionWaits
from .goals import Goals, Late
from .overtaking import Overtaking
from .preemption import Preemption
from .prefill_budget import PrefillBudget
from .ranking import Ranking
from .tenant_shares import TenantShares
from .waiting_queue import WaitingQueue
from .yielding import Yielding

RISE_PERIOD_SECONDS = 1.0
"""Seconds between two looks whether requests have waited long enough to move up a tier."""


class Seating:
    def __init__(
        self,
        config: EngineConfig,
        rows: Rows,
        blocks: Blocks,
        clock: Callable[[], float],
        prefill_seconds: Callable[[], float],
    ) -> None:
        """`prefill_seconds`: time in which a prompt token is computed, 0 where it is not known."""
        self.max_chunk = config.max_chunk
        """Prompt tokens that a request gets of a step, at most."""
        self._rows = rows
        self._blocks = blocks
        self._clock = clock
        self._shares = TenantShares(config.max_num_seqs, blocks.num_usable, clock)
        self._ranking = Ranking(config.policy, rows, clock, prefill_seconds)
        self._waiting = WaitingQueue(self._num_shares, self._ranking.turn_of)
        self._budget = PrefillBudget(
            self._shares, self.max_chunk, prefill_seconds, has_cache=config.has_cache
        )
        self._preemption = Preemption(rows, blocks, self._shares)
        self._yielding = Yielding(self._waiting, self._preemption, rows, blocks)
        self._overtaking = Overtaking(
            self._waiting, self._ranking, self._yielding, rows, blocks, clock
        )
        self._goals = Goals(self._waiting, self._ranking, rows, clock)
        self._slot_is_kept_for: RequestState | None = None
        """Request that has waited for long for a slot of its adapter."""
        self._eviction_waits = EvictionWaits(
            self._waiting,
            rows,
            blocks,
            self._preemption,
            clock,
            prefill_seconds,
            are_allowed=config.waits_to_evict,
        )
        self._num_preemptions = 0

    def enter(self, request: RequestState) -> None:
        """Notes a new request; `wait` is to follow."""
        self._shares.enter(request.tenant, request.weight)

    def wait(self, request: RequestState) -> None:
        """Takes a request without a row into the queue."""
        self._ranking.enter(request)
        self._budget.rank_begun(request, request.num_uncached_tokens)
        self._waiting.push(request)

    def hold(self, request: RequestState, wait: Wait) -> None:
        """Holds a request until the event comes."""
        if isinstance(wait, Follow):
            self._waiting.await_leader(wait.leader, request, wait.num_blocks)
        else:
            self._waiting.await_load(request, wait)

    def note_scheduled(self, leader: RequestState, num_blocks: int) -> None:
        """Lets requests go on that wait for a leader's first `num_blocks` blocks."""
        self._waiting.leader_advanced(leader, num_blocks)

    def note_left(self, leader: RequestState) -> None:
        """Lets requests go on that wait until a request has given back its blocks."""
        self._waiting.leader_left(leader)

    def load_ended(self, ticket: Ticket) -> list[RequestState]:
        """Makes requests ready that waited for this load, and returns them."""
        return self._waiting.load_ended(ticket)

    def recount(self, request: RequestState, num_uncached_tokens: int) -> None:
        """Notes that a waiting request has another number of tokens to compute."""
        self._waiting.recount(request, num_uncached_tokens)

    def leave(self, request: RequestState) -> None:
        """Notes the end of a request, wherever it is."""
        self._shares.leave(request.tenant)
        if self._slot_is_kept_for is request:
            self._slot_is_kept_for = None
            self._waiting.bring_back()
        if request.row == NO_ROW:
            self._waiting.remove(request)
            self._ranking.end(request)

    def promote(self) -> None:
        """Moves requests up that have waited for long; looks once a second at most."""
        may_rise = self._waiting.may_rise or self._ranking.promotes
        if may_rise and (now := self._clock()) >= self._waiting.rise_at:
            self._waiting.rise_at = now + RISE_PERIOD_SECONDS
            self._waiting.rise(now, self._ranking.promote)

    def policy_name(self, request: RequestState) -> str:
        """Policy by which the request is ordered."""
        return self._ranking.policy_of(request).name

    def late(self) -> list[Late]:
        """Waiting requests to refuse: their first token cannot come in time."""
        return self._goals.late()

    def add_credit(self, request: RequestState, tokens: int) -> None:
        self._preemption.remove_stalled(request)
        if request.row == NO_ROW:
            self._waiting.add_credit(request, tokens)
        else:
            self._rows.table.credit[request.row] += tokens

    def bound_prompts(self, seconds: float) -> None:
        """Bounds the seconds for which a step computes prompts; 0: as many tokens as its budget
        has."""
        self._budget.max_seconds = seconds or math.inf

    def begin(self, step: StepBuilder) -> None:
        """Divides the budget of a step between decode rows and prompts."""
        self._eviction_waits.end()
        step.prompt_budget = self._budget.of_step(step.budget, self._goals.token_seconds)
        step.beside_begun = self._budget.beside_begun()

    @property
    def awaits_begun(self) -> bool:
        """Whether a request whose answer has begun waits for its blocks."""
        return self._waiting.awaits_begun

    def parts(self, step: StepBuilder, prefilling: list[RequestState]) -> dict[str, int]:
        """Prompt tokens of the step by tenant; empty where no two share."""
        following = self._waiting.peek() if self._rows.num_free_seats else None
        following = None if following is self._yielding.too_large else following
        return self._budget.parts(step.prompt_budget, prefilling, following)

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._rows.running) + len(self._waiting)

    @property
    def following(self) -> RequestState | None:
        """The waiting request that is looked at next."""
        return self._waiting.peek()

    def next(
        self, step: StepBuilder, may_go: Callable[[RequestState], bool]
    ) -> RequestState | None:
        """The request that may take a seat in this step; None where it does not fit, or may not go
        now."""
        request = self._waiting.peek()
        if (
            request is None
            or request is self._yielding.too_large
            or not may_go(request)
            or self.budget_of(step, request) <= 0
            or not self._shares.may_take(request.tenant, self._rows.num_free_seats)
        ):
            return None
        return request

    def budget_of(self, step: StepBuilder, request: RequestState) -> int:
        """Tokens that a waiting request may take of the step."""
        budget = step.budget_of(request)
        return self._budget.of_prompt(budget, request.num_tokens, is_first=step.is_empty)

    @property
    def overtakes(self) -> bool:
        """Whether a waiting request may go before prompts that are being computed."""
        return self._ranking.overtakes

    def goes_before(self, other: RequestState, request: RequestState) -> bool:
        """Whether a waiting request has its prompt computed before that of `other`."""
        return self._overtaking.goes_before(request, other)

    def fits(self, request: RequestState, wanted: Wanted) -> bool:
        """Whether a request finds its blocks, and one for each running request to grow into; one
        that does not is not looked at again until some are released."""
        num_wanted = self.num_taken(wanted)
        if num_wanted <= self._blocks.num_free:
            return True
        self._yielding.note_too_large(request, num_wanted)
        return False

    def evicts_dearly(self, request: RequestState, wanted: Wanted) -> bool:
        """Whether a request had better wait than evict what its blocks take the place of."""
        return self._eviction_waits.are_worth_it(request, wanted)

    def await_room(self, request: RequestState) -> None:
        """Puts a request that would have to evict blocks aside, so that others pass it, until
        blocks become free or it has waited for long."""
        self._eviction_waits.begin(request)

    def num_taken(self, wanted: Wanted) -> int:
        """Free pages that a seat takes, those included into which running requests grow."""
        num_grown = self._blocks.num_growing(len(self._rows.running))
        return self._blocks.num_taken(wanted) + num_grown

    @property
    def is_blocked(self) -> bool:
        """Whether a request found too few blocks, and none were released since."""
        return self._yielding.too_large is not None

    def pass_by(self, request: RequestState) -> bool:
        """Puts a request that found too few blocks aside until some are released. Returns whether
        others may pass it: they may not once it has been blocked for long."""
        now = self._clock()
        if request.blocked_at is None:
            request.blocked_at = now
        policy = self._ranking.policy_of(request)
        if not policy.passes_blocked or now - request.blocked_at >= BLOCKED_SECONDS:
            return False
        self._yielding.note_released()
        self._waiting.set_aside(request)
        return True

    def may_take_slot(self, request: RequestState) -> bool:
        """Whether no other request has waited for long for a slot of its adapter. A request without
        an adapter takes none."""
        kept_for = self._slot_is_kept_for
        return kept_for is None or kept_for is request or request.adapter == NO_DIGEST

    def await_slot(self, request: RequestState) -> None:
        """Puts a request whose adapter finds no slot aside until a request ends. Once it has waited
        for long, other requests with adapters wait too."""
        now = self._clock()
        if request.blocked_at is None:
            request.blocked_at = now
        if self._slot_is_kept_for is None and now - request.blocked_at >= BLOCKED_SECONDS:
            self._slot_is_kept_for = request
        self._waiting.set_aside(request)

    def seat(self, request: RequestState) -> None:
        """Takes the request out of the queue, which gets a row now."""
        if self._slot_is_kept_for is request:
            self._slot_is_kept_for = None
        self._waiting.pop(request)
        self._ranking.leave(request)
        request.blocked_at = None
        request.has_yielded = False
        self._shares.seat(request.tenant)
        self._note_move()

    def rank_seated(self, request: RequestState) -> None:
        """Ranks a running request by what is left to compute."""
        self._ranking.note_seated(request)
        num_tokens = request.num_tokens - request.num_computed
        self._budget.rank_begun(request, num_tokens)
        self._eviction_waits.note_seated(num_tokens)

    def stalled(self) -> Iterator[RequestState]:
        """Running requests whose readers take nothing, while others lack room. Each is to be
        preempted before the next is asked for."""
        return self._yielding.stalled()

    def ahead(self) -> Iterator[RequestState]:
        """Running requests of tenants that hold more than waiting ones, and those that the policy
        ranks behind a waiting request of the same tenant; see `stalled`."""
        if self._shares.are_several:
            yield from self._yielding.ahead()
        if self._ranking.overtakes:
            yield from self._overtaking.victims()

    def last(self) -> RequestState:
        """The running request that gives way where a step lacks blocks."""
        return self._preemption.last()

    def note_preempted(self, request: RequestState, *, yields: bool) -> None:
        request.has_yielded = yields
        request.num_preemptions += 1
        self._num_preemptions += 1

    def unseat(self, request: RequestState, *, was_prefilling: bool) -> None:
        """Notes that a request runs no longer."""
        self._preemption.remove_stalled(request)
        self._shares.unseat(request.tenant)
        self._note_move()
        if was_prefilling:
            self._waiting.leader_left(request)

    def stall(self, request: RequestState) -> None:
        """Notes that a request's reader takes nothing. Until it gets credit, waiting requests may
        take its seat and blocks."""
        rows = self._rows
        is_decoding = request.key in rows.running and request.key not in rows.prefilling
        if is_decoding and rows.table.credit[request.row] <= 0:
            self._preemption.add_stalled(request)
            self.note_released()

    def note_released(self) -> None:
        """Notes that blocks came free, or may be taken from a stalled request."""
        self._yielding.note_released()
        self._waiting.bring_back()

    # Needs that come before those of prefetches; see `Needs`.

    @property
    def num_blocks_needed(self) -> int:
        num_waited_for = self._blocks.num_needed(self._waiting.num_tokens) + len(self._waiting)
        return self._blocks.num_pages_of_blocks(len(self._rows.running) + num_waited_for)

    @property
    def awaits_any_load(self) -> bool:
        return self._waiting.awaits_any_load

    def awaits(self, ticket: Ticket) -> bool:
        return self._waiting.awaits(ticket)

    def describe(self, load: EngineLoad) -> None:
        load.num_waiting += len(self._waiting)
        load.num_prefill_tokens += self._waiting.num_tokens
        load.num_preemptions = self._num_preemptions
        load.policy = self._ranking.policies_text

    def weights_of_tenants(self) -> dict[str, float]:
        """Weights of the tenants that have requests, at most `MAX_TENANTS` of them."""
        return self._shares.weights(MAX_TENANTS)

    def _num_shares(self, request: RequestState) -> int:
        """Shares that the request's tenant holds. A request that yielded its seat counts as one
        more while its tenant holds any: else it would take the seat back at once from another
        tenant with as many shares."""
        return self._shares.num_shares(request.tenant) + (
            request.has_yielded and self._shares.level(request.tenant) > 0
        )

    def _note_move(self) -> None:
        """Notes that a seat was taken or left."""
        self._yielding.note_move()
        self._waiting.reorder()
