"""Builds the plan of a step, and what is remembered of it until it retires."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..executor import (
    NO_COPIES,
    AdapterCopy,
    AdmittedRow,
    BoolArray,
    DrawPlan,
    Int32Array,
    StepPlan,
)
from ..step_output import MasksWanted, StoredChain
from .blocks.blocks import Blocks
from .table.masks import RowIndices
from .table.request_state import RequestState
from .table.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Known tokens of one request that one step computes."""

    request: RequestState
    row: int
    start: int
    count: int
    is_last: bool
    samples: bool
    scores_prompt: bool
    """Whether log probabilities of prompt tokens are wanted from it."""
    pools: bool
    """Whether its hidden states are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan with what its result means to the scheduler."""

    plan: StepPlan | DrawPlan
    sampled_rows: RowIndices
    """[S] as the executor's result is ordered."""
    chunks: list[Chunk] = field(default_factory=list)
    stored: list[StoredChain] = field(default_factory=list)
    """Cached by this step's prompt chunks, and nowhere before; announced when it retires."""
    cached: list[bytes] = field(default_factory=list)
    """Hashes of all blocks that its prompt chunks fill, also of those that a block source
    stores."""
    masks_wanted: MasksWanted | None = None
    """Masks for rows whose logits this step holds, for the first time since they were seated or
    with drafts."""
    reserved: Int32Array | None = None
    """[S] tokens that each sampled row may gain at most, where that is not certain."""

    @property
    def is_draw(self) -> bool:
        return isinstance(self.plan, DrawPlan)

    @property
    def is_silent(self) -> bool:
        """Whether its result has no tokens: all rows are sampled later."""
        return not (self.chunks or self.sampled_rows.size)


@dataclass(slots=True)
class StepBuilder:
    """Plan in the making: decode rows as arrays, prompt chunks one by one. A chunk that reads
    blocks of another one comes after it."""

    budget: int
    """Tokens that the step may still compute."""
    decode_rows: RowIndices
    prompt_budget: int = 0
    """Tokens that chunks of prompts may still take, at most `budget`."""
    beside_begun: int | None = None
    """Tokens that other requests may use while an answer that has begun is recomputed; None: no
    bound."""
    first_begun: RequestState | None = None
    """The answer that is recomputed, which bounds the others."""
    others_budget: int | None = None
    """Tokens that other requests may still use; None: no bound."""
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[AdmittedRow] = field(default_factory=list)
    stored: list[StoredChain] = field(default_factory=list)
    cached: list[bytes] = field(default_factory=list)
    num_drafts: Int32Array | None = None
    """Drafts of decode rows, where they get any."""
    draft_ids: Int32Array | None = None
    """Drafts of the host; None: the executor drafts."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages that are copied, from and to."""
    block_updates: list[tuple[Int32Array, Int32Array, Int32Array]] = field(default_factory=list)
    """Rows, columns and pages of block-table entries."""

    def add(self, chunk: Chunk) -> None:
        """Subtracts a chunk of a prompt from both budgets, that of tokens and that of others beside
        a resumed answer."""
        self.chunks.append(chunk)
        self.budget -= chunk.count
        self.prompt_budget -= chunk.count
        if self.others_budget is not None and chunk.request is not self.first_begun:
            self.others_budget -= chunk.count

    def begin_with(self, begun: RequestState | None, *, waits: bool = False) -> None:
        """Bounds the tokens of other requests while the answer `begun` is recomputed, if there is
        one; `waits`: it waits for its blocks."""
        self.first_begun = begun
        self.others_budget = self.beside_begun if waits or begun is not None else None
        if self.others_budget is not None:
            self.others_budget -= sum(chunk.count for chunk in self.chunks)

    def budget_of(self, request: RequestState) -> int:
        """Tokens that a chunk of the request may take."""
        if self.others_budget is None or request is self.first_begun:
            return self.prompt_budget
        return min(self.prompt_budget, self.others_budget)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.decode_rows.size

    @property
    def num_requests(self) -> int:
        return self.decode_rows.size + len(self.chunks)

    def set_pages(self, rows: RowIndices, columns: Int32Array, pages: Int32Array) -> None:
        """Writes pages into columns of the rows' block tables."""
        self.block_updates.append((rows.astype(np.int32), columns, pages))

    def admit(self, request: RequestState, columns: Int32Array, pages: list[int]) -> None:
        """Gives the request, which has a row of the table, to the executor with its pages."""
        if request.has_begun and (self.first_begun is None or request.rank < self.first_begun.rank):
            self.begin_with(request)
        self._set_pages_of(request, columns, pages)
        self.admitted.append(
            AdmittedRow(
                row=request.row,
                adapter=request.adapter_slot,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                choice_index=request.choice_index,
            )
        )

    def extend(self, request: RequestState, num_tokens: int, blocks: Blocks) -> None:
        """Allocates blocks for `num_tokens` tokens of the request's row, as far as blocks are
        free."""
        self._set_pages_of(request, *blocks.extend(request, num_tokens))

    def _set_pages_of(self, request: RequestState, columns: Int32Array, pages: list[int]) -> None:
        rows = np.full(len(pages), request.row)
        self.set_pages(rows, columns, np.array(pages, np.int32))

    def grow(self, rows: RowIndices, blocks: Blocks) -> None:
        """Gives each row one more block."""
        if rows.size:
            self.set_pages(*blocks.grow(rows))

    def compose(
        self,
        step: int,
        table: RequestTable,
        released: list[int],
        copied_adapters: list[AdapterCopy],
        *,
        shares: bool,
    ) -> PlannedStep:
        """The plan; decode rows advance in the table by the tokens that they may get."""
        starts, counts, follows = self._advance(table)
        plan_rows, starts, counts, samples, num_drafts = self._with_chunks(starts, counts)
        output_indices = starts + counts - table.num_prompt[plan_rows]
        if num_drafts is not None:
            output_indices -= num_drafts
        samples, holds = self._hold(table, plan_rows, output_indices, samples, num_drafts)
        block_rows, block_indices, block_ids = self._joined_updates()
        plan = StepPlan(
            step=step,
            released=released,
            admitted=self.admitted,
            block_rows=block_rows,
            block_indices=block_indices,
            block_ids=block_ids,
            rows=plan_rows.astype(np.int32),
            starts=starts,
            counts=counts,
            samples=samples,
            output_indices=output_indices,
            holds=holds,
            num_drafts=num_drafts,
            draft_ids=self.draft_ids,
            follows=follows,
            copied_adapters=copied_adapters,
            copied_blocks=np.array(self.copies, np.int32) if self.copies else NO_COPIES,
            shares=shares,
            prompt_logprob_rows=[chunk.row for chunk in self.chunks if chunk.scores_prompt],
            pooled_rows=[chunk.row for chunk in self.chunks if chunk.pools],
        )
        return PlannedStep(
            plan=plan,
            sampled_rows=plan_rows[samples],
            chunks=self.chunks,
            stored=self.stored,
            cached=self.cached,
            masks_wanted=self._masks_wanted(table, holds),
            reserved=None if num_drafts is None else (num_drafts + 1)[samples],
        )

    def _advance(self, table: RequestTable) -> tuple[Int32Array, Int32Array, BoolArray | None]:
        """Starts and counts of the decode rows, and `_following`. The rows are advanced in the
        table."""
        rows = self.decode_rows
        counts = np.ones(rows.size, np.int32) if self.num_drafts is None else self.num_drafts + 1
        starts = table.num_computed[rows]
        table.num_computed[rows] = starts + counts
        table.credit[rows] -= counts
        follows = self._following(table)
        if self.num_drafts is not None:
            table.drafts.note_planned(rows, self.num_drafts, are_given=self.draft_ids is not None)
        return starts, counts, follows

    def _hold(
        self,
        table: RequestTable,
        rows: RowIndices,
        output_indices: Int32Array,
        samples: BoolArray,
        num_drafts: Int32Array | None,
    ) -> tuple[BoolArray, BoolArray]:
        """Returns whether each row samples in this step, and whether its logits are held until its
        masks are known."""
        if not table.held.has_grammars:
            return samples, np.zeros(rows.size, np.bool_)
        holds = samples & table.held.has_grammar[rows]
        table.held.hold(
            rows[holds], output_indices[holds], 0 if num_drafts is None else num_drafts[holds]
        )
        return samples & ~holds, holds

    def _with_chunks(
        self, starts: Int32Array, counts: Int32Array
    ) -> tuple[RowIndices, Int32Array, Int32Array, BoolArray, Int32Array | None]:
        """RowIndices, starts, counts, whether a token is sampled, and drafts: those of decode rows,
        then those of chunks."""
        rows = self.decode_rows
        samples = np.ones(self.decode_rows.size, np.bool_)
        num_drafts = self.num_drafts
        if not self.chunks:
            return rows, starts, counts, samples, num_drafts
        if num_drafts is not None:
            num_drafts = np.concatenate((num_drafts, np.zeros(len(self.chunks), np.int32)))
        return (
            np.concatenate((rows, [chunk.row for chunk in self.chunks]), dtype=np.intp),
            np.concatenate((starts, [chunk.start for chunk in self.chunks]), dtype=np.int32),
            np.concatenate((counts, [chunk.count for chunk in self.chunks]), dtype=np.int32),
            np.concatenate((samples, [chunk.samples for chunk in self.chunks])),
            num_drafts,
        )

    def _following(self, table: RequestTable) -> BoolArray | None:
        """Whether each row of the plan follows a step with drafts in flight, so that only the
        executor knows its position."""
        is_uncertain = table.drafts.are_uncertain(self.decode_rows)
        if is_uncertain is None:
            return None
        return np.concatenate((is_uncertain, np.zeros(len(self.chunks), np.bool_)))

    def _masks_wanted(self, table: RequestTable, holds: BoolArray) -> MasksWanted | None:
        """Requests of masks. Decode rows asked for theirs when they were chunks; masks after drafts
        could not be asked for earlier."""
        if not table.held.has_grammars:
            return None
        num_decodes = self.decode_rows.size
        requests = [
            chunk.request
            for chunk, held in zip(self.chunks, holds[num_decodes:], strict=True)
            if held
        ]
        rows = [request.row for request in requests]
        draft_ids: list[list[int]] = [[] for _ in requests]
        if self.num_drafts is not None and self.draft_ids is not None:
            ends = np.cumsum(self.num_drafts)
            drafted = np.flatnonzero(holds[:num_decodes] & (self.num_drafts > 0))
            rows += self.decode_rows[drafted].tolist()
            bounds = zip(
                (ends - self.num_drafts)[drafted].tolist(), ends[drafted].tolist(), strict=True
            )
            draft_ids += [self.draft_ids[start:end].tolist() for start, end in bounds]
        if not rows:
            return None
        return MasksWanted(
            keys=table.keys[rows].tolist(),
            rows=rows,
            tickets=table.held.tickets[rows].tolist(),
            output_indices=table.held.first_held[rows].tolist(),
            draft_ids=draft_ids,
        )

    def _joined_updates(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        if not self.block_updates:
            return NO_UPDATES
        if len(self.block_updates) == 1:
            return self.block_updates[0]
        rows, indices, blocks = zip(*self.block_updates, strict=True)
        return np.concatenate(rows), np.concatenate(indices), np.concatenate(blocks)


def compose_draw(step: int, table: RequestTable, max_positions: int) -> PlannedStep | None:
    """Plans a draw of at most `max_positions` held positions whose masks are known; None where
    there are none."""
    if not table.held.has_grammars:
        return None
    rows, output_indices, num_positions = table.held.take_drawable(max_positions)
    if not rows.size:
        return None
    is_certain = bool((num_positions == 1).all())
    plan = DrawPlan(
        step=step,
        rows=rows.astype(np.int32),
        positions=output_indices + table.num_prompt[rows],
        output_indices=output_indices,
        masks=table.held.masks,
        num_drafts=None if is_certain else num_positions - 1,
    )
    return PlannedStep(plan=plan, sampled_rows=rows, reserved=None if is_certain else num_positions)


NO_UPDATES = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
