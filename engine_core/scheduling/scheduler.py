"""Decides what each step computes: one budget of tokens, spent so that computed catches up with
known.

Plans ahead of results: a decode row is given the token it will have sampled. Knows nothing about
executors or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..config import EngineConfig
from ..executor import Int32Array
from ..kv.block_leases import BlockLeases
from ..kv.block_source import BlockSource
from ..kv.tiers import Tiers
from ..step_output import MAX_RESIDENT, EngineLoad
from .blocks.blocks import Blocks
from .blocks.state_blocks import StateBlocks
from .blocks.wanted import Wanted
from .rows.rows import Rows
from .seating.adapter_slots import NO_DIGEST, AdapterSlots
from .seating.seating import Seating
from .speculation.speculator import Speculator
from .step_builder import Chunk, PlannedStep, StepBuilder, compose_draw
from .step_drafts import add_drafts
from .table.masks import RowIndices
from .table.request_state import NO_ROW, RequestState


class Scheduler:
    """Seats requests in rows, and gives rows blocks and parts of steps.

    A request is in one of three places: waiting, in `seating`; running, in `rows`; or leaving, when
    it computes nothing more but a launched step still lists its row and blocks.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        masks: Int32Array,
        speculator: Speculator,
        tiers: Tiers,
        *,
        sources: Sequence[BlockSource] = (),
        prefill_seconds: Callable[[], float] = lambda: 0.0,
        copies_blocks: bool = False,
    ) -> None:
        """`masks` is int32 [positions, rows, words]; `sources` are asked for blocks after the
        tiers; `prefill_seconds` says in which time a prompt token is computed, 0 where it is not
        known."""
        self._config = config
        self._clock = clock
        self.rows = rows = Rows(config, masks, speculator, clock)
        self.blocks = (StateBlocks if config.state_pages else Blocks)(
            config,
            clock,
            tiers,
            sources,
            prefill_seconds=prefill_seconds,
            num_decoding=lambda: rows.num_decoding,
            copies_blocks=copies_blocks,
        )
        self.adapters = AdapterSlots(config.num_adapter_ranks)
        self.seating = Seating(config, rows, self.blocks, clock, prefill_seconds)

    def schedule(self) -> PlannedStep | None:
        """The next step, or none if nobody can compute: running requests first; when blocks are
        short nobody joins."""
        # A group in which no row can compute passes its turn to the next group.
        for _ in self.rows.turns():
            if (planned := self._schedule_rows()) is not None:
                return planned
        return None

    def _schedule_rows(self) -> PlannedStep | None:
        self._make_room()
        for leader, num_blocks in self.blocks.begin_step():
            self.seating.note_scheduled(leader, num_blocks)
        rows, full_rows, is_short = self._decode_rows()
        step = StepBuilder(self._config.max_num_batched_tokens - rows.size, rows)
        self.seating.begin(step)
        step.grow(full_rows, self.blocks)
        prefilling = self.rows.prefilling_by_rank()
        begun = (each for each in prefilling if each.has_begun and self.rows.has_turn(each))
        step.begin_with(next(begun, None), waits=self.seating.awaits_begun)
        if not is_short:
            self._admit(step, lambda request: request.has_begun)
        if prefilling:
            self._continue_prefills(step, prefilling, overtakes=not is_short)
        if not is_short:
            self._admit(step)
        if step.is_empty:
            return None
        if not is_short:
            add_drafts(step, self.rows, self.blocks, self._config.max_positions)
        following = self.seating.following
        if following is not None and following.adapter != NO_DIGEST:
            self.adapters.copy_ahead(following.adapter, following.tenant)
        return step.compose(
            self.rows.note_step(step.num_requests),
            self.rows.table,
            self.rows.take_released(),
            self.adapters.take_copies(),
            shares=self.blocks.is_any_shared,
        )

    def draw(self) -> PlannedStep | None:
        """Plans a draw of the held rows that have their masks; None where no row has."""
        planned = compose_draw(self.rows.next_step, self.rows.table, self._config.max_positions)
        if planned is not None:
            self.rows.note_draw()
        return planned

    def enqueue(self, request: RequestState) -> None:
        """Takes a new request, which has known tokens to compute."""
        self.seating.enter(request)
        self._wait(request)

    def _wait(self, request: RequestState) -> None:
        self.blocks.hash(request)
        request.num_uncached_tokens = self.blocks.num_uncached_tokens(request)
        self.seating.wait(request)

    def retire(self, step: int) -> None:
        """Gives back what was kept for the steps up to `step`, which are settled."""
        self.rows.retire(step)
        if self.blocks.retire(step):
            self.seating.note_released()
        self._release_leaving()

    def settle_loads(self) -> bool:
        """Lets requests go on whose blocks came from a source, or will not. Whether there were such
        loads. To be called between the last plan of a step and its cache events."""
        settled = self.blocks.poll()
        for load in settled:
            for request in self.seating.load_ended(load.ticket):
                self.blocks.note_loaded(request, load)
                if (failed := load.failed_source) is not None:
                    num_uncached = self.blocks.num_uncached_without(request, failed)
                    self.seating.recount(request, num_uncached)
        if settled:
            self.seating.note_released()
        return bool(settled)

    def lend(self, leases: BlockLeases) -> bool:
        """Advances the leases of blocks that other engines copy from here; leased blocks are not
        evicted. Returns whether blocks became free."""
        if has_released := leases.advance(self.rows.retired_step):
            self.seating.note_released()
        return has_released

    def roll_back(self, rows: RowIndices, reserved: Int32Array, gained: Int32Array) -> None:
        """Gives back the blocks and the credit of tokens that a step with drafts reserved for
        rows[i], reserved[i] of them, and did not gain."""
        table = self.rows.table
        table.roll_back(rows, reserved - gained, reserved > 1)
        if self.blocks.shrink(rows, table.num_computed):
            self.seating.note_released()

    def release_unseen(self, rows: RowIndices, num_computed: Int32Array) -> None:
        """Gives back the blocks of rows that no layer sees from position num_computed[i] on, before
        which retired steps have computed keys and values."""
        if self.blocks.release_unseen(rows, num_computed, self.rows.table):
            self.seating.note_released()

    def preempt_all(self) -> None:
        """Takes row and blocks from every running request. All of them wait again when no step is
        in flight."""
        for request in list(self.rows.running.values()):
            self._preempt(request)

    def finish(self, request: RequestState) -> None:
        """Ends a request in any state; tokens that steps in flight sample for it are ignored."""
        request.has_finished = True
        self.seating.leave(request)
        self._end_slot_wait(request)
        if request.row == NO_ROW:
            return
        self.rows.table.is_alive[request.row] = False
        if request.key in self.rows.running:
            self._leave(request)

    def describe(self, load: EngineLoad) -> None:
        """Fills in the counts of requests and blocks, and of what became of them."""
        table = self.rows.table
        load.num_wasted_slots = self.blocks.num_wasted_slots(table.num_known, table.is_alive)
        self.rows.describe(load)
        self.blocks.describe(load)
        self.seating.describe(load)
        load.resident_adapters = self.adapters.resident[-MAX_RESIDENT:]

    def _decode_rows(self) -> tuple[RowIndices, RowIndices, bool]:
        """Returns the rows that decode in this step, those of them that need a block (there are
        enough free), and whether some row or the chunk of a prompt gets no block."""
        rows, full_rows, num_needed = self._decodable_rows()
        if num_needed <= self.blocks.num_free:
            return rows, full_rows, False
        while num_needed > self.blocks.num_free + self.blocks.num_returning(self.rows.leaving):
            self._preempt(self.seating.last())
            rows, full_rows, num_needed = self._decodable_rows()
        # Blocks that are being released serve the rows of the lowest rank in a later step.
        by_rank = np.array(sorted(full_rows.tolist(), key=self.rows.table.rank_of), np.intp)
        num_served = self.blocks.num_growable(by_rank)
        served, deferred = np.split(by_rank, [min(num_served, by_rank.size)])
        return np.setdiff1d(rows, deferred, assume_unique=True), served, True

    def _decodable_rows(self) -> tuple[RowIndices, RowIndices, int]:
        """Returns the rows that can decode, those of them that need a block, and the number of
        pages that these rows need together with prompts whose next token has no page."""
        rows = self.rows.decodable()
        full_rows = self.blocks.full_rows(rows, self.rows.table.num_computed)
        num_stuck = sum(
            self.blocks.num_lacking(each, each.num_computed + 1)
            for each in self.rows.prefilling.values()
        )
        return rows, full_rows, self.blocks.num_to_grow(full_rows) + num_stuck

    def _continue_prefills(
        self, step: StepBuilder, prefilling: list[RequestState], *, overtakes: bool
    ) -> None:
        parts = self.seating.parts(step, prefilling)
        for request in prefilling:
            if not self.rows.has_turn(request):
                continue
            if overtakes and self.seating.overtakes:
                self._admit_before(step, request, parts)
            self._add_part(step, request, parts)

    def _add_part(self, step: StepBuilder, request: RequestState, parts: dict[str, int]) -> None:
        """Adds a chunk, at most its tenant's part of the step's budget if `parts` has one."""
        budget = min(step.budget_of(request), parts.get(request.tenant, step.prompt_budget))
        if budget > 0:
            parts[request.tenant] = budget - self._add_chunk(step, request, budget)

    def _add_chunk(self, step: StepBuilder, request: RequestState, budget: int) -> int:
        """Adds the request's next known tokens to the step, as many as the budget and free blocks
        allow; returns their number."""
        start = request.num_computed
        end = min(request.num_tokens, start + min(budget, self.seating.max_chunk))
        end = self.blocks.chunk_end(request, end)
        if self.blocks.num_held_tokens(request) < end:
            step.extend(request, end, self.blocks)
            end = min(end, self.blocks.num_held_tokens(request))
        count = end - start
        if not count:
            return 0
        request.num_computed = end
        is_last = end == request.num_tokens
        self._cache_chunk(request, step)
        step.add(
            Chunk(
                request=request,
                row=request.row,
                start=start,
                count=count,
                is_last=is_last,
                samples=is_last and end < request.max_len,
                scores_prompt=request.wants_prompt_logprobs
                and start < request.num_prompt_tokens - 1,
                pools=bool(request.sampling.pooling),
            )
        )
        if is_last:
            self.rows.start_decoding(request)
            self.blocks.start_decoding(request)
        return count

    def _cache_chunk(self, request: RequestState, step: StepBuilder) -> None:
        """Lets other requests hit the blocks that this step computes, followers first."""
        if self._config.enable_prefix_caching:
            stored, cached = self.blocks.note_computed(request)
            step.stored += stored
            step.cached += cached
            if self.blocks.are_hit_at_once:
                self.seating.note_scheduled(request, self.blocks.num_full(request))

    def _admit_before(
        self, step: StepBuilder, request: RequestState, parts: dict[str, int]
    ) -> None:
        """Seats waiting requests whose prompts the policy has computed before this one's."""

        def may_go(waiting: RequestState) -> bool:
            has_part = parts.get(waiting.tenant, step.prompt_budget) > 0
            return has_part and self.seating.goes_before(request, waiting)

        self._admit(step, may_go, parts)

    def _admit(
        self,
        step: StepBuilder,
        may_go: Callable[[RequestState], bool] = lambda _: True,
        parts: dict[str, int] | None = None,
    ) -> None:
        """Seats ready requests in order, until one does not fit or `may_go` refuses it. A request
        is given the blocks of its known tokens at once, as many as a row holds, and leaves one
        block for each running request to grow into. `parts`: prompt tokens of the step by tenant,
        if they are divided already."""
        if self.rows.num_preempted:
            return
        num_requests = self.seating.num_requests
        while step.prompt_budget > 0 and self.rows.has_room(num_requests):
            request = self.seating.next(step, may_go)
            if request is None:
                return
            if not self._finds_slot(request):
                self.adapters.shares.wait(request.key, request.tenant)
                self.seating.await_slot(request)
                continue
            wanted = self.blocks.wanted(request)
            wait = self.blocks.wait_of(
                request, wanted, self.rows.prefilling.values()
            ) or self.blocks.wait_of_leaving(request, wanted, self.rows.leaving)
            if wait is not None:
                self.seating.hold(request, wait)
            elif not self.seating.fits(request, wanted):
                self._unseat_stalled()
                if self.seating.is_blocked and not self.seating.pass_by(request):
                    return
            elif self.seating.evicts_dearly(request, wanted):
                self.seating.await_room(request)
            elif (ticket := self.blocks.load(request, wanted)) is not None:
                self.seating.hold(request, ticket)
            else:
                self._seat(step, request, wanted)
                if parts is None:
                    self._add_chunk(step, request, self.seating.budget_of(step, request))
                else:
                    self._add_part(step, request, parts)
            self._end_slot_wait(request)

    def _finds_slot(self, request: RequestState) -> bool:
        """Whether a slot holds the request's adapter or has room for it, and no other waiting
        request comes first."""
        fits = self.adapters.fits(request.adapter, request.tenant)
        return fits and self.seating.may_take_slot(request)

    def _end_slot_wait(self, request: RequestState) -> None:
        """Notes that a request waits for no slot any more: others may take one now."""
        if self.adapters.shares.end_wait(request.key):
            self.seating.note_released()

    def _seat(self, step: StepBuilder, request: RequestState, wanted: Wanted) -> None:
        num_taken = self.seating.num_taken(wanted)
        partial = self.blocks.reserve_partial(request, wanted, num_taken, self.rows.next_step)
        request.adapter_slot = self.adapters.seat(request.adapter, request.tenant)
        self.seating.seat(request)
        self.rows.seat(request)
        placed = self.blocks.seat(request, wanted, partial)
        self.seating.rank_seated(request)
        step.admit(request, *placed)
        step.copies += self.blocks.copies(request, wanted, partial)

    def _make_room(self) -> None:
        """Preempts for waiting requests before a step is planned, since none that has a part in it
        may leave."""
        self._unseat_stalled()
        for request in self.seating.ahead():
            self._preempt(request, yields=True)

    def _unseat_stalled(self) -> None:
        for request in self.seating.stalled():
            self._preempt(request, yields=True)

    def _preempt(self, request: RequestState, *, yields: bool = False) -> None:
        """Takes row and blocks from a request; it waits again, with what steps in flight sample for
        it."""
        self.seating.note_preempted(request, yields=yields)
        self._leave(request)

    def _leave(self, request: RequestState) -> None:
        was_prefilling = self.rows.leave(request)
        self.seating.unseat(request, was_prefilling=was_prefilling)
        self._release_leaving()

    def _release_leaving(self) -> None:
        """Frees rows and blocks of requests that have left and that no step in flight lists."""
        for request in self.rows.returning():
            self.blocks.release(request)
            self.adapters.leave(request.adapter, request.tenant)
            self.rows.vacate(request)
            self.seating.note_left(request)
            self.seating.note_released()
            if not request.has_finished:
                since_seated = self._clock() - request.seated_at
                request.risen_at = max(request.added_at, request.risen_at) + since_seated
                self._wait(request)
