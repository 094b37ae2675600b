"""Decides what each step computes: one budget of tokens, spent so that computed catches up with
known.

Plans ahead of results: a decode row is given the token it will have sampled. Knows nothing about
executors or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from ..config import EngineConfig
from ..executor import Int32Array
from ..kv.block_leases import BlockLeases
from ..kv.block_loads import BlockLoads
from ..kv.block_pool import BlockPool
from ..kv.block_source import BlockSource
from ..kv.prefix_cache import PrefixCache
from .block_waits import BlockWaits
from .decode_ahead import DecodeAhead
from .forks import Forks, PartialBlock
from .masks import HeldRows, Rows
from .pending_release import PendingRelease
from .pipeline_groups import row_groups
from .preemption import Preemption
from .prefetched_blocks import PrefetchedBlocks
from .prefill_budget import PrefillBudget
from .prefix_hits import PrefixHits
from .request_state import NO_ROW, RequestState
from .request_table import RequestTable
from .seats import Seats
from .speculator import Speculator
from .step_builder import Chunk, PlannedStep, StepBuilder, compose_draw
from .step_counts import StepCounts
from .tenant_shares import TenantShares
from .waiting_queue import WaitingQueue
from .yielding import Yielding


class Scheduler:
    """Owns the waiting queue and decides over rows and blocks.

    A request is in one of three places: `waiting`; `running` (until its known tokens are computed
    also `prefilling`); or leaving, when it computes nothing more but a launched step still lists
    its row and blocks.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        masks: Int32Array,
        speculator: Speculator | None = None,
        *,
        sources: Sequence[BlockSource] = (),
        prefill_seconds: Callable[[], float] = lambda: 0.0,
        copies_blocks: bool = False,
    ) -> None:
        """`masks` is int32 [positions, rows, words]; `prefill_seconds` says in which time a prompt
        token is computed, 0 where it is not known."""
        assert speculator is None or speculator.max_drafts <= config.max_draft_tokens
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool)
        self.loads = BlockLoads(
            self.pool, self.cache, sources, clock, lambda: prefill_seconds() * config.block_size
        )
        self.held = HeldRows(config.num_rows, masks, clock)
        self.speculator = speculator
        waiting, ahead = (
            (None, None) if speculator is None else (speculator.needs_result, speculator.runs_ahead)
        )
        self.table = RequestTable(config, self.held, waiting, ahead)
        self.shares = TenantShares(config.max_num_seqs, self.pool.num_usable, clock)
        self.waiting = WaitingQueue(self._num_shares)
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.loads.num_decoding = lambda: len(self.running) - len(self.prefilling)
        self.num_preemptions = 0
        self.prefetched = PrefetchedBlocks(self.pool, config.block_size)
        self.hits = PrefixHits(self.cache, self.prefetched, clock)
        self._waits = BlockWaits(
            self.loads, self.cache, self.waiting, self.prefilling, self.hits, config.block_size
        )
        self._config = config
        self._clock = clock
        self._max_chunk = config.long_prefill_chunk or config.max_num_batched_tokens
        self.prefill_budget = PrefillBudget(self.shares, self._max_chunk, prefill_seconds)
        self._planned_step = self._retired_step = 0
        self._counts, self._pending_release = StepCounts(), PendingRelease(self.table, self.pool)
        self._groups = row_groups(config.num_groups, config.num_rows)
        self._seats = Seats(self.running, self.table, config.max_num_seqs)
        self._preemption = Preemption(self.running, self.shares, self.table, config.block_size)
        self._yielding = Yielding(
            self.waiting, self._preemption, self._pending_release, self._seats, self.pool
        )
        self._ahead = DecodeAhead(self.table, self.pool, speculator, config)
        self.forks = Forks(self.pool, self.table, self.waiting, is_on=copies_blocks)
        self._released_rows: list[int] = []

    def schedule(self) -> PlannedStep | None:
        """The next step, or none if nobody can compute: running requests first; when blocks are
        short nobody joins."""
        # A group in which nobody can compute gives its turn to the next one.
        for _ in range(len(self._groups)):
            self._groups.advance()
            if (planned := self._schedule_rows()) is not None:
                return planned
        return None

    def _schedule_rows(self) -> PlannedStep | None:
        self._make_room()
        self.forks.begin_step()
        rows, full_rows, is_short = self._decode_rows()
        budget = self._config.max_num_batched_tokens - rows.size
        step = StepBuilder(
            budget, self.prefill_budget.of_step(budget), rows, self.prefill_budget.beside_begun()
        )
        step.grow(full_rows, self.table, self.pool)
        prefilling = sorted(self.prefilling.values(), key=attrgetter("rank"))
        begun = (each for each in prefilling if each.has_begun and self._groups.has_turn(each.row))
        step.begin_with(next(begun, None), waits=self.waiting.awaits_begun)
        if not is_short:
            self._admit(step, begun=True)
        if prefilling:
            self._continue_prefills(step, prefilling)
        if not is_short:
            self._admit(step)
        if step.is_empty:
            return None
        if not is_short:
            self._ahead.add_drafts(step, len(self.running))
        return self._compose(step)

    def _compose(self, step: StepBuilder) -> PlannedStep:
        self._planned_step += 1
        self._counts.note(step.num_requests)
        released = self._released_rows
        self._released_rows = []
        return step.compose(
            self._planned_step, self.table, released, shares=self.pool.num_shared > 0
        )

    def draw(self) -> PlannedStep | None:
        """Plans a draw of the held rows that have their masks; None where no row has."""
        planned = compose_draw(self._planned_step + 1, self.table, self._config.max_positions)
        self._planned_step += planned is not None
        return planned

    def enqueue(self, request: RequestState) -> None:
        """Takes a new request, which has known tokens to compute."""
        self.shares.enter(request.tenant, request.weight)
        self._wait(request)

    def _wait(self, request: RequestState) -> None:
        if self._config.enable_prefix_caching:
            request.chain.cover(request.token_ids, self._config.block_size)
        max_hits = request.num_cacheable_blocks(self._config.block_size)
        num_hits = len(self.cache.match(request.chain, max_hits))
        if (offer := self.loads.find(request.chain, num_hits, max_hits)) is not None:
            num_hits += offer.num_blocks
        request.num_uncached_tokens = request.num_tokens - num_hits * self._config.block_size
        self.prefill_budget.rank_begun(request, request.num_uncached_tokens)
        self.waiting.push(request)

    def retire(self, step: int) -> None:
        """Gives back what was kept for the steps up to `step`, which are settled."""
        self._retired_step = step
        self.held.note_retired()
        if self.forks.retire(step):
            self._yielding.note_released()
        self._release_leavers()

    def settle_loads(self) -> bool:
        """Lets requests go on whose blocks came from a source, or will not. Whether there were such
        loads. To be called between the last plan of a step and its cache events."""
        if has_settled := self._waits.settle():
            self._yielding.note_released()
        return has_settled

    def lend(self, leases: BlockLeases) -> bool:
        """Advances the leases of blocks that other engines copy from here, and that stay as they
        are meanwhile. Whether blocks came free, which may be what a request waits for."""
        if has_released := leases.advance(self._retired_step):
            self._yielding.note_released()
        return has_released

    def roll_back(self, rows: Rows, reserved: Int32Array, gained: Int32Array) -> None:
        """Gives back the blocks and the credit of tokens that a step with drafts reserved for
        rows[i], reserved[i] of them, and did not gain."""
        self.table.roll_back(rows, reserved - gained, reserved > 1)
        for row in rows[self.table.has_spare_blocks(rows)].tolist():
            self.pool.release(self.table.take_spare_blocks(row))
            self._yielding.note_released()

    def finish(self, request: RequestState) -> None:
        """Ends a request wherever it is; what steps in flight sample for it does not count."""
        request.has_finished = True
        self.shares.leave(request.tenant)
        if request.row == NO_ROW:
            self.waiting.remove(request)
            return
        self.table.is_alive[request.row] = False
        if request.key in self.running:
            self._leave(request)

    def add_credit(self, request: RequestState, tokens: int) -> None:
        self._preemption.remove_stalled(request)
        if request.row == NO_ROW:
            self.waiting.add_credit(request, tokens)
        else:
            self.table.credit[request.row] += tokens

    def stall(self, request: RequestState) -> None:
        """Notes that a request's reader takes nothing. Until it gets credit, waiting requests may
        take its seat and blocks."""
        if (
            request.key in self.running
            and request.key not in self.prefilling
            and self.table.credit[request.row] <= 0
        ):
            self._preemption.add_stalled(request)
            self._yielding.note_released()

    @property
    def has_leavers(self) -> bool:
        return bool(self._pending_release)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._pending_release.num_unfinished

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens that nobody has computed, running and waiting."""
        running = sum(
            request.num_tokens - request.num_computed for request in self.prefilling.values()
        )
        return running + self.waiting.num_tokens

    def _decode_rows(self) -> tuple[Rows, Rows, bool]:
        """Rows that decode in this step, those of them that need a block (there are enough), and
        whether some went without."""
        rows, full_rows = self._decodable_rows()
        if full_rows.size <= self.pool.num_free:
            return rows, full_rows, False
        while full_rows.size > self.pool.num_free + self._pending_release.num_returning_blocks():
            self._preempt(self._preemption.last())
            rows, full_rows = self._decodable_rows()
        # Blocks that are being released serve the rows of the lowest rank in a later step.
        by_rank = np.array(sorted(full_rows.tolist(), key=self.table.rank_of), np.intp)
        served, deferred = np.split(by_rank, [self.pool.num_free])
        return np.setdiff1d(rows, deferred, assume_unique=True), served, True

    def _decodable_rows(self) -> tuple[Rows, Rows]:
        rows = self._groups.of_turn(self.table.decodable_rows())
        return rows, rows[self.table.num_computed[rows] == self.table.capacity[rows]]

    def _continue_prefills(self, step: StepBuilder, prefilling: list[RequestState]) -> None:
        following = self.waiting.peek() if self._seats.num_free else None
        following = None if following is self._yielding.too_large else following
        parts = self.prefill_budget.parts(step.prompt_budget, prefilling, following)
        for request in prefilling:
            if not self._groups.has_turn(request.row):
                continue
            budget = min(step.budget_of(request), parts.get(request.tenant, step.prompt_budget))
            if budget > 0:
                parts[request.tenant] = budget - self._add_chunk(step, request, budget)

    def _add_chunk(self, step: StepBuilder, request: RequestState, budget: int) -> int:
        """The request's next known tokens, as many as the budget allows; how many these are."""
        start = request.num_computed
        count = min(request.num_tokens - start, budget, self._max_chunk)
        request.num_computed = end = start + count
        is_last = end == request.num_tokens
        self._cache_full_blocks(request, step)
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
            del self.prefilling[request.key]
            self.table.start_decoding(request)
            self.forks.note_whole(request)
        return count

    def _cache_full_blocks(self, request: RequestState, step: StepBuilder) -> None:
        """From now on others may hit what this step computes, followers first of all."""
        if not self._config.enable_prefix_caching:
            return
        first = request.chain.num_cached
        num_full = request.num_computed // self._config.block_size
        step.stored.extend(
            self.cache.offer(request.chain, self.table.blocks_of(request.row)[first:num_full])
        )
        step.cached.extend(request.chain.hashes[first:num_full])
        self.waiting.leader_advanced(request, num_full)

    def _admit(self, step: StepBuilder, *, begun: bool = False) -> None:
        """Seats ready requests in order, until one does not fit or, if `begun`, has no answer yet.
        A request gets the blocks of all its known tokens at once, and leaves a block for each
        running one to grow into."""
        if self._pending_release.num_preempted:
            return
        num_seats = len(self.running) + len(self.waiting)
        while step.prompt_budget > 0 and self._seats.num_free and self._groups.has_room(num_seats):
            request = self.waiting.peek()
            if (
                request is None
                or request is self._yielding.too_large
                or (begun and not request.has_begun)
            ):
                return
            if step.budget_of(request) <= 0 or not self.shares.may_take(
                request.tenant, self._seats.num_free
            ):
                return
            max_hits = request.num_cacheable_blocks(self._config.block_size)
            hits = self.cache.match(request.chain, max_hits)
            if len(hits) < max_hits and self._waits.follow(request, len(hits), max_hits):
                continue
            if self.forks.waits(request, self.prefilling.values()):
                continue
            num_new = -(-request.num_tokens // self._config.block_size) - len(hits)
            num_wanted = num_new + self.pool.count_unheld(hits) + len(self.running)
            if num_wanted > self.pool.num_free:
                self._yielding.note_too_large(request, num_wanted)
                self._unseat_stalled()
                if self._yielding.too_large is not None:
                    return
                continue
            offer = self.loads.find(request.chain, len(hits), max_hits, request.failed_sources)
            if offer is not None:
                self._waits.load(request, offer, hits)
                continue
            self.waiting.pop(request)
            self._seat(
                step,
                request,
                hits,
                num_new,
                self.forks.take(request, hits, num_wanted, self._planned_step + 1),
            )
            self._add_chunk(step, request, step.budget_of(request))

    def _seat(
        self,
        step: StepBuilder,
        request: RequestState,
        hits: list[int],
        num_new: int,
        partial: PartialBlock,
    ) -> None:
        self.pool.share(hits)
        blocks = hits + self.pool.allocate(num_new)
        request.chain.num_cached = len(hits)
        request.num_computed = len(hits) * self._config.block_size + partial.num_tokens
        self.prefill_budget.rank_begun(request, request.num_tokens - request.num_computed)
        self.hits.note_seated(request)
        self._counts.begin(request)
        self.table.seat(request, blocks)
        self._groups.seat(request.row)
        if self.speculator is not None:
            self.speculator.seat(request)
        request.has_yielded = False
        request.failed_sources = ()
        self.shares.seat(request.tenant)
        self._moved()
        self.running[request.key] = self.prefilling[request.key] = request
        step.admit(request, blocks, partial)

    def _num_shares(self, request: RequestState) -> int:
        """The shares that the request's tenant holds. A request that yielded its seat counts one
        more while its tenant holds any: it would take the seat back at once from another tenant
        with as many shares."""
        return self.shares.num_shares(request.tenant) + (
            request.has_yielded and self.shares.level(request.tenant) > 0
        )

    def _moved(self) -> None:
        """A seat was taken or left."""
        self._yielding.note_move()
        self.waiting.reorder()

    def _make_room(self) -> None:
        """Preempts for waiting requests before a step is planned, since none that has a part in it
        may leave."""
        self._unseat_stalled()
        for request in self._yielding.ahead() if self.shares.are_several else ():
            self._preempt(request, yields=True)

    def _unseat_stalled(self) -> None:
        for request in self._yielding.stalled():
            self._preempt(request, yields=True)

    def _preempt(self, request: RequestState, *, yields: bool = False) -> None:
        """Takes row and blocks from a request; it waits again, with what steps in flight sample for
        it."""
        request.has_yielded = yields
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._leave(request)

    def _leave(self, request: RequestState) -> None:
        del self.running[request.key]
        self._groups.leave(request.row)
        self._preemption.remove_stalled(request)
        self.shares.unseat(request.tenant)
        self._moved()
        self._counts.end(request)
        self.table.count_drafts(request)
        if self.prefilling.pop(request.key, None) is not None:
            self.waiting.leader_left(request)
        self.table.stop_decoding(request.row)
        self._pending_release.push(request, self._planned_step)
        self._release_leavers()

    def _release_leavers(self) -> None:
        """Rows and blocks of finished requests that no step in flight lists return."""
        for request in self._pending_release.pop_until(self._retired_step):
            row = request.row
            self.loads.release(self.table.blocks_of(row), request.chain.hashes, request.chain.owner)
            known_ids = self.table.known_ids(row).copy()
            credit = int(self.table.credit[row])
            if self.speculator is not None:
                self.table.count_drafts(request)
                self.speculator.vacate(row, known_ids)
            self.table.vacate(row)
            self._released_rows.append(row)
            self._yielding.note_released()
            if not request.has_finished:
                request.token_ids = known_ids
                request.credit = credit
                request.num_computed = 0
                request.risen_at = (
                    max(request.added_at, request.risen_at) + self._clock() - request.seated_at
                )
                self._wait(request)
