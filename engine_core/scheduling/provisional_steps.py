"""Steps that are launched behind a copy of blocks which has nearly ended, before the blocks are
known to be good.

An engine that has nothing else to do plans the step of a request that waits for such a copy while
the copy goes on, and the executor computes it behind the copy. When the load has ended well, the
step counts as any other does. Otherwise what it computed is thrown away, and the request waits
again. Until then nothing of it is cached, published or said, and no other step is planned, since
the device would compute it behind the copy too. Knows requests and tickets; knows nothing about
engines that lend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import EngineConfig
from ..kv.block_loads import SettledLoad
from ..kv.block_pool import BlockPool
from ..kv.block_source import Ticket
from ..kv.prefix_cache import PrefixCache
from .forks import NO_PARTIAL, Forks, PartialBlock
from .prefix_hits import PrefixHits
from .request_state import RequestState
from .request_table import RequestTable
from .step_builder import PlannedStep, StepBuilder
from .waiting_queue import WaitingQueue

NO_STEP = -1


class Planner(Protocol):
    """Parts and methods of the scheduler that provisional steps use."""

    pool: BlockPool
    cache: PrefixCache
    table: RequestTable
    waiting: WaitingQueue
    forks: Forks
    running: dict[int, RequestState]

    @property
    def has_leavers(self) -> bool: ...

    def seat(
        self,
        step: StepBuilder,
        request: RequestState,
        hits: list[int],
        num_new: int,
        partial: PartialBlock,
    ) -> None: ...

    def add_chunk(self, step: StepBuilder, request: RequestState, budget: int) -> int: ...

    def compose(self, step: StepBuilder) -> PlannedStep: ...

    def cache_full_blocks(self, request: RequestState, step: StepBuilder | PlannedStep) -> None: ...

    def leave(self, request: RequestState) -> None: ...


@dataclass(frozen=True, slots=True)
class _ProvisionalStep:
    ticket: Ticket
    request: RequestState
    planned: PlannedStep
    num_hits: int
    """Blocks that are cached if the load ends well."""


class ProvisionalSteps:
    """At most one is open: launched, and its load has not ended."""

    def __init__(
        self,
        planner: Planner,
        hits: PrefixHits,
        config: EngineConfig,
        nearly_loaded: Callable[[], Sequence[Ticket]],
    ) -> None:
        """`nearly_loaded`: loads whose blocks will soon be there, and behind which the executor can
        compute."""
        self._planner = planner
        self._hits = hits
        self._nearly_loaded = nearly_loaded
        self._block_size = config.block_size
        self._budget = config.max_num_batched_tokens
        self._max_chunk = min(self._budget, config.long_prefill_chunk or self._budget)
        self._has_groups = config.num_groups > 1
        self._open: _ProvisionalStep | None = None
        self._void_step = NO_STEP
        self.num_steps = self.num_void = 0
        """Provisional steps so far, and those of them that were thrown away."""

    @property
    def is_open(self) -> bool:
        """Whether no step may be planned or retired, since it is not known yet what becomes of a
        provisional one."""
        return self._open is not None

    def is_void(self, step: int) -> bool:
        """Whether the results of this step are thrown away."""
        return step == self._void_step

    def plan(self) -> PlannedStep | None:
        """A provisional step of the only request there is; None where it waits for something else
        or has no room."""
        waiting = self._planner.waiting
        planner = self._planner
        # A step in flight has rows that run, or are about to leave.
        is_busy = bool(planner.running) or planner.has_leavers or len(waiting) != 1
        if is_busy or self._has_groups or not waiting.awaits_any_load:
            return None
        for ticket in self._nearly_loaded():
            request = waiting.sole_awaiting(ticket)
            if request is not None and (cached := self._blocks_before(request, ticket)) is not None:
                return self._launch(ticket, request, cached)
        return None

    def settle(self, settled: Sequence[SettledLoad]) -> None:
        """Takes loads that ended or were given up."""
        for load in settled if self._open is not None else ():
            if self._open is not None and load.ticket is self._open.ticket:
                provisional = self._open
                self._open = None
                self._end(provisional, load)

    def _end(self, provisional: _ProvisionalStep, load: SettledLoad) -> None:
        request = provisional.request
        if load.failed_source is not None:
            self.num_void += 1
            self._void_step = provisional.planned.plan.step
        if request.has_finished:
            return
        self._hits.note_loaded(request, load.tier, load.num_loaded * self._block_size)
        if load.failed_source is None:
            self._hits.count(request, provisional.num_hits * self._block_size)
            self._planner.cache_full_blocks(request, provisional.planned)
            self._planner.table.start_hashing(request)
            return
        request.failed_sources += (load.failed_source,)
        self._take_back(request)

    def _take_back(self, request: RequestState) -> None:
        """Lets the request wait again once its step has retired, with what it had before."""
        table = self._planner.table
        table.credit[request.row] += request.num_tokens < request.max_len
        self._planner.leave(request)

    def _blocks_before(self, request: RequestState, ticket: Ticket) -> list[int] | None:
        """Cached blocks of the request before those of the load; None where a step behind the load
        is no use."""
        if request.has_grammar or request.forks or request.looks_at_all or request.sampling.pooling:
            return None
        max_hits = request.num_cacheable_blocks(self._block_size)
        cached = self._planner.cache.match(request.chain, max_hits)
        if request.chain.hashes[len(cached) : max_hits] != list(ticket.hashes):
            return None
        pool = self._planner.pool
        num_wanted = self._num_blocks(request) - max_hits + pool.count_unheld(cached)
        is_short = request.num_tokens - max_hits * self._block_size <= self._max_chunk
        return cached if is_short and num_wanted <= pool.num_free else None

    def _launch(self, ticket: Ticket, request: RequestState, cached: list[int]) -> PlannedStep:
        planner = self._planner
        hits = [*cached, *ticket.blocks]
        planner.waiting.end_wait(ticket, request)
        step = StepBuilder(
            self._budget, self._budget, planner.table.decodable_rows(), awaits_copies=True
        )
        planner.forks.begin_step()
        planner.seat(step, request, hits, self._num_blocks(request) - len(hits), NO_PARTIAL)
        planner.add_chunk(step, request, self._budget)
        self._open = _ProvisionalStep(ticket, request, planner.compose(step), len(hits))
        self.num_steps += 1
        return self._open.planned

    def _num_blocks(self, request: RequestState) -> int:
        return -(-request.num_tokens // self._block_size)
