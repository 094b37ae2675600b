"""Decides what each step computes: one budget of tokens, spent so that computed catches up with known.

Plans ahead of results: a decode row is given the token it will have sampled. Knows nothing about executors or outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import AdmittedRow, DrawPlan, Int32Array
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.host_tier import HostTier
from headwater.engine_core.kv.prefix_cache import PrefixCache
from headwater.engine_core.scheduling.drafter import Drafter
from headwater.engine_core.scheduling.masks import HeldRows, Rows
from headwater.engine_core.scheduling.pending_release import Leavers
from headwater.engine_core.scheduling.preemption import Victims
from headwater.engine_core.scheduling.request_state import NO_ROW, Rank, RequestState
from headwater.engine_core.scheduling.request_table import RequestTable
from headwater.engine_core.scheduling.step_builder import Chunk, PlannedStep, StepBuilder
from headwater.engine_core.scheduling.tenant_shares import TenantShares, split
from headwater.engine_core.scheduling.waiting_queue import WaitingQueue
from headwater.engine_core.step_output import StoredChain


class Scheduler:
    """Owns the waiting queue and decides over rows and blocks.

    A request is in one of three places: `waiting`; `running` (until its known tokens are computed also `prefilling`);
    or leaving, when it computes nothing more but a launched step still lists its row and blocks.
    """

    def __init__(
        self, config: EngineConfig, clock: Callable[[], float], masks: Int32Array, drafter: Drafter | None = None
    ) -> None:
        """`masks` is int32 [rows, positions, words]."""
        assert drafter is None or drafter.max_drafts < config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool)
        self.host = HostTier(self.pool, config.num_host_blocks)
        self.held = HeldRows(config.max_num_seqs, masks, clock)
        self.table = RequestTable(config, self.held, has_drafter=drafter is not None)
        self.shares = TenantShares(config.max_num_seqs, self.pool.num_usable, clock)
        self.waiting = WaitingQueue(self._num_shares)
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.num_preemptions = 0
        self._config = config
        self._clock = clock
        self._drafter = drafter
        self._max_chunk = config.long_prefill_chunk or config.max_num_batched_tokens
        self._planned_step = self._retired_step = 0
        self._num_planned_rows = 0
        """Of all steps so far: requests that each computed, added up."""
        self._leavers = Leavers(self.table, self.pool)
        self._victims = Victims(self.running, self.shares, self.table, config.block_size)
        self._released_rows: list[int] = []
        # Found too few blocks; not looked at again until some are released.
        self._too_large: RequestState | None = None
        self._num_blocks_wanted = 0
        self._num_moves = 0
        """Seats that were taken or left."""
        # For whom nobody had to yield, after so many moves.
        self._unyielding: tuple[int, int] | None = None

    def schedule(self) -> PlannedStep | None:
        """The next step, or none if nobody can compute: running requests first; when blocks are short nobody joins."""
        self._unseat_stalled()
        if self.shares.are_several:
            self._yield()
        rows, full_rows, is_short = self._decode_rows()
        step = StepBuilder(self._config.max_num_batched_tokens - rows.size, rows)
        self._grow(step, full_rows)
        self._continue_prefills(step)
        if not is_short:
            self._admit(step)
        if step.is_empty:
            return None
        if not is_short:
            self._add_drafts(step)
        if not (step.chunks or is_short):
            self._plan_ahead(step)
        self._planned_step += 1
        self._num_planned_rows += step.num_requests
        released, self._released_rows = self._released_rows, []
        return step.compose(self._planned_step, self.table, released, shares=self.pool.num_shared > 0)

    def draw(self) -> PlannedStep | None:
        """What is held and has its masks, or none."""
        rows, output_indices, num_positions = self.held.take_drawable()
        if not rows.size:
            return None
        self._planned_step += 1
        is_certain = bool((num_positions == 1).all())
        plan = DrawPlan(
            step=self._planned_step,
            rows=rows.astype(np.int32),
            positions=output_indices + self.table.num_prompt[rows],
            output_indices=output_indices,
            masks=self.held.masks,
            num_drafts=None if is_certain else num_positions - 1,
        )
        return PlannedStep(plan=plan, sampled_rows=rows, reserved=None if is_certain else num_positions)

    def enqueue(self, request: RequestState) -> None:
        """Takes a new request, which has known tokens to compute."""
        self.shares.enter(request.tenant, request.weight)
        self._wait(request)

    def _wait(self, request: RequestState) -> None:
        if self._config.enable_prefix_caching:
            request.chain.cover(request.token_ids, self._config.block_size)
        max_hits = request.num_cacheable_blocks(self._config.block_size)
        num_hits = len(self.cache.match(request.chain, max_hits))
        num_hits += len(self.host.find(request.chain, num_hits, max_hits))
        request.num_uncached_tokens = request.num_tokens - num_hits * self._config.block_size
        self.waiting.push(request)

    def retire(self, step: int) -> None:
        """Gives back what was kept for the steps up to `step`, which are settled."""
        self._retired_step = step
        self.held.note_retired()
        self._release_leavers()

    def loaded(self, num_blocks: int) -> None:
        """Of all blocks that were to come back from host memory, the first `num_blocks` have."""
        if self.host.finish_loads(num_blocks):
            self.waiting.blocks_came(num_blocks)
            self._too_large = None

    def roll_back(self, rows: Rows, counts: Int32Array) -> None:
        """Gives back the blocks and the credit of counts[i] tokens that were reserved for rows[i] and not gained."""
        self.table.roll_back(rows, counts)
        for row in rows[self.table.has_spare_blocks(rows)].tolist():
            self.pool.release(self.table.take_spare_blocks(row))
            self._too_large = None

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
        self._victims.remove_stalled(request)
        if request.row == NO_ROW:
            self.waiting.add_credit(request, tokens)
        else:
            self.table.credit[request.row] += tokens

    def stall(self, request: RequestState) -> None:
        """Notes that a request's reader takes nothing. Until it gets credit, waiting requests may take its seat and
        blocks."""
        if request.key in self.running and request.key not in self.prefilling and self.table.credit[request.row] <= 0:
            self._victims.add_stalled(request)
            self._too_large = None

    @property
    def has_leavers(self) -> bool:
        return bool(self._leavers)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._leavers.num_unfinished

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens that nobody has computed, running and waiting."""
        running = sum(request.num_tokens - request.num_computed for request in self.prefilling.values())
        return running + self.waiting.num_tokens

    # Running requests.

    def _decode_rows(self) -> tuple[Rows, Rows, bool]:
        """Rows that decode in this step, those of them that need a block (there are enough), and whether some went
        without."""
        rows, full_rows = self._decodable_rows()
        if full_rows.size <= self.pool.num_free:
            return rows, full_rows, False
        while full_rows.size > self.pool.num_free + self._leavers.num_returning_blocks():
            self._preempt(self._victims.last())
            rows, full_rows = self._decodable_rows()
        # What is on its way back serves those of the lowest rank in a later step.
        by_rank = np.array(sorted(full_rows.tolist(), key=self._rank_of_row), np.intp)
        served, deferred = np.split(by_rank, [self.pool.num_free])
        return np.setdiff1d(rows, deferred, assume_unique=True), served, True

    def _decodable_rows(self) -> tuple[Rows, Rows]:
        rows = self.table.decodable_rows()
        return rows, rows[self.table.num_computed[rows] == self.table.capacity[rows]]

    def _grow(self, step: StepBuilder, full_rows: Rows) -> None:
        if full_rows.size:
            blocks = self.pool.allocate(full_rows.size)
            step.set_blocks(full_rows, self.table.append_block(full_rows, blocks), blocks)

    def _plan_ahead(self, step: StepBuilder) -> None:
        """Several steps at once while nothing changes: all rows decode plainly, nobody waits, blocks are there."""
        table, rows, most = self.table, step.decode_rows, self._config.decode_steps
        if most == 1 or self.num_waiting or not (table.is_plain[rows] & ~table.needs_result[rows]).all():
            return
        row_steps = np.minimum(table.compute_end[rows] - table.num_computed[rows], most)
        full_rows = rows[table.num_computed[rows] + row_steps > table.capacity[rows]]
        if (table.credit[rows] >= row_steps).all() and full_rows.size <= self.pool.num_free:
            self._grow(step, full_rows)
            step.row_steps = row_steps

    def _add_drafts(self, step: StepBuilder) -> None:
        """Guesses for rows that decode, with the budget that is left and blocks that no other row can need."""
        table, rows = self.table, step.decode_rows
        if self._drafter is None or not rows.size:
            return
        most = np.minimum(table.compute_end[rows] - table.num_computed[rows], table.credit[rows]) - 1
        most = np.minimum(most, min(self._drafter.max_drafts, step.budget // rows.size)) * table.needs_result[rows]
        room = table.capacity[rows] - table.num_computed[rows] - 1
        if np.count_nonzero(most > room) + len(self.running) > self.pool.num_free:
            most = np.minimum(most, room)
        num_drafts, draft_ids = self._drafter.draft(table, rows, most.astype(np.int32))
        if num_drafts.any():
            self._grow(step, rows[num_drafts > room])
            step.budget -= int(num_drafts.sum())
            step.num_drafts, step.draft_ids = num_drafts, draft_ids

    def _continue_prefills(self, step: StepBuilder) -> None:
        if not self.prefilling:
            return
        parts = self._parts_of_budget(step.budget) if self.shares.are_several else {}
        for request in sorted(self.prefilling.values(), key=_rank):
            budget = min(step.budget, parts.get(request.tenant, step.budget))
            if budget > 0:
                count = self._add_chunk(step, request, budget)
                parts[request.tenant] = budget - count

    def _parts_of_budget(self, budget: int) -> dict[str, int]:
        """Of each tenant that prefills, and of the one whose turn is next: no prompt keeps others out by its length."""
        demands = Counter[str]()
        for request in self.prefilling.values():
            demands[request.tenant] += min(request.num_tokens - request.num_computed, self._max_chunk)
        following = self.waiting.peek() if self.table.free_rows else None
        if following is not None and following is not self._too_large:
            demands[following.tenant] += min(following.num_uncached_tokens, self._max_chunk)
        parts = split(budget, demands, self.shares.weight)
        return {tenant: max(1, part) for tenant, part in parts.items()}

    def _add_chunk(self, step: StepBuilder, request: RequestState, budget: int) -> int:
        """The request's next known tokens, as many as the budget allows; how many these are."""
        start = request.num_computed
        count = min(request.num_tokens - start, budget, self._max_chunk)
        request.num_computed = end = start + count
        is_last = end == request.num_tokens
        step.budget -= count
        step.stored += self._cache_full_blocks(request)
        step.chunks.append(
            Chunk(
                request=request,
                row=request.row,
                start=start,
                count=count,
                is_last=is_last,
                samples=is_last and end < request.max_len,
                scores_prompt=request.wants_prompt_logprobs and start < request.num_prompt_tokens - 1,
                pools=bool(request.sampling.pooling),
            )
        )
        if is_last:
            del self.prefilling[request.key]
            self.table.start_decoding(request)
        return count

    def _cache_full_blocks(self, request: RequestState) -> list[StoredChain]:
        """From now on others may hit what this step computes, followers first of all."""
        if not self._config.enable_prefix_caching:
            return []
        num_full = request.num_computed // self._config.block_size
        blocks = self.table.blocks_of(request.row)[request.chain.num_cached : num_full]
        stored = self.cache.offer(request.chain, blocks)
        self.waiting.leader_advanced(request, num_full)
        return stored

    # Waiting requests.

    def _admit(self, step: StepBuilder) -> None:
        """Seats ready requests in order, until one does not fit. A request gets the blocks of all its known tokens at
        once, and leaves a block for each running one to grow into."""
        if self._leavers.num_preempted:
            return
        while step.budget > 0 and self.table.free_rows:
            request = self.waiting.peek()
            if request is None or request is self._too_large:
                return
            if not self.shares.may_take(request.tenant, len(self.table.free_rows)):
                return
            max_hits = request.num_cacheable_blocks(self._config.block_size)
            hits = self.cache.match(request.chain, max_hits)
            if len(hits) < max_hits and self._follows(request, len(hits), max_hits):
                continue
            num_new = -(-request.num_tokens // self._config.block_size) - len(hits)
            num_wanted = num_new + self.pool.count_unheld(hits) + len(self.running)
            if num_wanted > self.pool.num_free:
                self._too_large, self._num_blocks_wanted = request, num_wanted
                self._unseat_stalled()
                if self._too_large is not None:
                    return
                continue
            if slots := self.host.find(request.chain, len(hits), max_hits):
                self.waiting.await_blocks(request, self.host.load(request.chain, hits, slots))
                continue
            self.waiting.pop(request)
            self._seat(step, request, hits, num_new)
            self._add_chunk(step, request, step.budget)

    def _follows(self, request: RequestState, num_hits: int, max_hits: int) -> bool:
        """Holds a request whose first missing block is computed or fetched for another, until it is there."""
        missed = request.chain.hashes[num_hits]
        for leader in self.prefilling.values():
            hashes = leader.chain.hashes
            if leader.chain.num_cached <= num_hits < len(hashes) and hashes[num_hits] == missed:
                self.waiting.follow(leader, request, min(max_hits, request.chain.num_shared(leader.chain)))
                return True
        if (ticket := self.host.ticket(missed)) is not None:
            self.waiting.await_blocks(request, ticket)
        return ticket is not None

    def _seat(self, step: StepBuilder, request: RequestState, hits: list[int], num_new: int) -> None:
        self.pool.share(hits)
        blocks = hits + self.pool.allocate(num_new)
        request.chain.num_cached = len(hits)
        request.num_computed = len(hits) * self._config.block_size
        if request.scheduled_at is None:
            request.scheduled_at = self._clock()
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            self.cache.count(request.num_prompt_tokens, request.num_cached_tokens)
        request.num_steps -= self._planned_step
        request.num_step_rows -= self._num_planned_rows
        row = self.table.seat(request, blocks)
        self.table.needs_result[row] = self._drafter is not None and self._drafter.serves(request)
        request.has_yielded = False
        self.shares.seat(request.tenant)
        self._moved()
        self.running[request.key] = self.prefilling[request.key] = request
        step.set_blocks(np.full(len(blocks), row), np.arange(len(blocks), dtype=np.int32), blocks)
        step.admitted.append(
            AdmittedRow(
                row=row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                choice_index=request.choice_index,
            )
        )

    def _unseat_stalled(self) -> None:
        """Preempts requests whose readers take nothing, while others lack room. No step, planned or in flight, computes
        them."""
        while (stalled := self._victims.first_stalled()) is not None and self._lacks_room():
            self._preempt(stalled, yields=True)

    def _lacks_room(self) -> bool:
        """Whether the request whose turn is next lacks blocks, or some ready request a seat. What is on its way back
        counts."""
        following = self.waiting.peek()
        if following is None:
            return False
        if following is self._too_large:
            return self._num_blocks_wanted > self.pool.num_free + self._leavers.num_returning_blocks()
        return len(self.table.free_rows) + len(self._leavers) < self.waiting.num_ready

    # Fair shares: who is ahead yields to who is behind.

    def _num_shares(self, request: RequestState) -> int:
        """The shares that the request's tenant holds. A request that yielded its seat counts one more while its tenant
        holds any: it would take the seat back at once from another tenant with as many shares."""
        num_shares = self.shares.num_shares(request.tenant)
        return num_shares + int(request.has_yielded and self.shares.level(request.tenant) > 0)

    def _yield(self) -> None:
        """Before a step is planned, since none that has a part in it may leave: seats for the first of each waiting
        tenant, or blocks for the one whose turn is next. Rows on their way count."""
        if self.table.free_rows and self._too_large is None:
            return
        following = self.waiting.peek()
        if following is None or (self.table.free_rows and following is not self._too_large):
            return
        if self._unyielding == (following.key, self._num_moves):
            return
        held = self._victims.held_blocks()
        if following is self._too_large:
            while self._num_blocks_wanted > self.pool.num_free + self._leavers.num_returning_blocks():
                if not self._yield_to(following, held):
                    break
        else:
            for behind in self.waiting.heads()[len(self._leavers) :]:
                if not self._yield_to(behind, held):
                    break
        self._unyielding = (following.key, self._num_moves)

    def _yield_to(self, behind: RequestState, held: Counter[str]) -> bool:
        """Preempts one, if anybody has to make room."""
        victim = self._victims.take_for(behind, held)
        if victim is not None:
            self._preempt(victim, yields=True)
        return victim is not None

    def _moved(self) -> None:
        """A seat was taken or left."""
        self._num_moves += 1
        self.waiting.reorder()

    # Leaving requests.

    def _preempt(self, request: RequestState, *, yields: bool = False) -> None:
        """Takes row and blocks from a request; it waits again, with what steps in flight sample for it."""
        request.has_yielded = yields
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._leave(request)

    def _leave(self, request: RequestState) -> None:
        del self.running[request.key]
        self._victims.remove_stalled(request)
        self.shares.unseat(request.tenant)
        self._moved()
        # Seating took off what had been planned before.
        request.num_steps += self._planned_step
        request.num_step_rows += self._num_planned_rows
        if self.prefilling.pop(request.key, None) is not None:
            self.waiting.leader_left(request)
        self.table.stop_decoding(request.row)
        self._leavers.push(request, self._planned_step)
        self._release_leavers()

    def _release_leavers(self) -> None:
        """Rows and blocks of leavers that no step in flight lists return."""
        for request in self._leavers.pop_until(self._retired_step):
            row = request.row
            self.host.release(self.table.blocks_of(row))
            known_ids, credit = self.table.known_ids(row).copy(), int(self.table.credit[row])
            self.table.vacate(row)
            self._released_rows.append(row)
            self._too_large = None
            if not request.has_finished:
                self._wait_again(request, known_ids, credit)

    def _wait_again(self, request: RequestState, known_ids: Int32Array, credit: int) -> None:
        request.token_ids, request.credit, request.num_computed = known_ids, credit, 0
        self._wait(request)

    def _rank_of_row(self, row: int) -> Rank:
        request = self.table.requests[row]
        assert request is not None
        return request.rank


def _rank(request: RequestState) -> Rank:
    return request.rank
