"""The simulated executor behind a check of every plan against the contract of executors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan, StepPlan, StepResult, Swapper
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units

BLOCK_SIZE = 16
MAX_MODEL_LEN = 128
MODEL = SimulatedModel(vocab_size=40, first_token_id=3, eos_token_id=2, eos_probability=0.02)


COLUMNS = [each.name for each in fields(StepPlan) if "Array" in str(each.type)]
"""Arrays of a plan."""


class CheckedExecutor:
    """The simulated executor behind a check of every plan against the contract."""

    def __init__(self, config: EngineConfig, late_polls: int) -> None:
        self.max_in_flight = self.num_steps = 0
        self._config = config
        self.model = replace(
            MODEL,
            windows=config.page_windows,
            num_state_units=num_units(config.state_pages),
        )
        self._executor = SimulatedExecutor(
            config, self.model, SimulatedTiming(late_polls=late_polls), verify_every=1
        )
        self._blocks: dict[int, dict[int, int]] = {}
        self._state_columns: dict[int, dict[int, int]] = {}
        """By row: what stands in columns of its states."""
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._num_prompt: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._uncertain: dict[int, int] = {}
        """Drafts in flight, by row."""
        self._own_drafts: deque[dict[int, int]] = deque()
        """By row, of each step in flight: the most that the executor may have drafted."""
        self.num_tokens_of_drafts = Counter[int]()
        """How often a row with drafts gained so many tokens."""
        self._draws: dict[int, list[int]] = {}
        self._sampled: deque[list[int]] = deque()
        """Rows of each step in flight."""
        # Of each step in flight: the row that may read a block, for all blocks.
        self._readers: deque[dict[int, set[int]]] = deque()
        # By row: blocks that plans said it writes.
        self._writable: dict[int, set[int]] = {}
        self._copied: dict[int, int] = {}
        """By row: the block that began as a copy in this plan."""

    @property
    def kv_blocks(self) -> UInt64Array:
        """[pages, block_size], for sources that read and write it."""
        return self._executor._cache.blocks

    @property
    def swapper(self) -> Swapper | None:
        return self._executor.swapper

    @property
    def copies_blocks(self) -> bool:
        return self._executor.copies_blocks

    @property
    def can_draft(self) -> bool:
        return self._executor.can_draft

    @property
    def computes_at_once(self) -> bool:
        return self._executor.computes_at_once

    @property
    def prefill_seconds(self) -> float:
        """Time of a token for which prompts wait rather than evict, where they may."""
        return 0.01 if self._config.waits_to_evict else self._executor.prefill_seconds

    def submit(self, plan: StepPlan) -> int:
        self.num_steps += 1
        self._take_rows(plan)
        self._take_blocks(self._without_states(plan))
        rows = plan.rows.tolist()
        arrays = [each for each in map(partial(getattr, plan), COLUMNS) if each is not None]
        assert all(each.dtype in (np.int32, np.bool_) for each in arrays), "as ranks read them"
        assert rows, "an empty step"
        assert len(set(rows)) == len(rows)
        assert plan.num_tokens <= self._config.max_num_batched_tokens
        if plan.num_drafts is None:
            assert plan.draft_ids is None
        else:
            assert plan.num_drafts.any()
            if plan.draft_ids is not None:
                assert plan.num_drafts.sum() == plan.draft_ids.size
                assert ((plan.draft_ids >= 0) & (plan.draft_ids < MODEL.vocab_size)).all(), (
                    "drafts are tokens"
                )
        readers: dict[int, set[int]] = {}
        writers: dict[int, int] = {}
        own_drafts: dict[int, int] = {}
        for i, row in enumerate(rows):
            start, end = self._plan_row(plan, i, row, own_drafts)
            for idx, column in self._columns_of(start, end):
                assert column in self._blocks[row], "a page that is seen is not there"
                block = self._blocks[row][column]
                readers.setdefault(block, set()).add(row)
                if (idx + 1) * BLOCK_SIZE > start:
                    assert writers.setdefault(block, row) == row, "two rows write a block"
                    assert block in self._writable[row], "written, and not said"
                    assert all(step.get(block, set()) <= {row} for step in self._readers), (
                        "written while listed"
                    )
            for page in self._state_pages(row, start, end):
                readers.setdefault(page, set()).add(row)
                assert writers.setdefault(page, row) == row, "two rows write a state"
                assert all(step.get(page, set()) <= {row} for step in self._readers), (
                    "a state is written while listed"
                )
        self._own_drafts.append(own_drafts)
        self._readers.append(readers)
        self._sampled.append(plan.rows[plan.samples].tolist())
        self.max_in_flight = max(self.max_in_flight, len(self._readers))
        assert len(self._readers) <= self._config.async_depth
        self._check_room()
        handle = self._executor.submit(plan)
        for row in own_drafts:
            # It computes at once, so it knows already.
            self._known[row] = int(self._executor._table.num_known[row])
            self._computed[row] = self._known[row] - 1
        return handle

    def _columns_of(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Blocks and columns of pages that positions start … end - 1 see."""
        for kind in self._config.page_kinds:
            first = kind.first_seen(start, BLOCK_SIZE)
            for group in kind.groups:
                for idx in range(first, -(-end // BLOCK_SIZE)):
                    yield idx, group * self._config.max_blocks + idx

    def _without_states(self, plan: StepPlan) -> StepPlan:
        """Takes note of the pages of states; returns the plan without them."""
        if not self._config.state_pages:
            return plan
        columns = self._config.columns
        is_state = plan.block_indices >= columns.first_place
        updates = zip(
            plan.block_rows[is_state].tolist(),
            plan.block_indices[is_state].tolist(),
            plan.block_ids[is_state].tolist(),
            strict=True,
        )
        for row, column, value in updates:
            assert column < columns.num_columns
            assert value if column >= columns.first_page else value < columns.num_sets
            self._state_columns[row][column] = value
        state_pages = set(plan.block_ids[is_state & (plan.block_indices >= columns.first_page)])
        copied = [pair for pair in plan.copied_blocks.tolist() if pair[1] not in state_pages]
        return replace(
            plan,
            block_rows=plan.block_rows[~is_state],
            block_indices=plan.block_indices[~is_state],
            block_ids=plan.block_ids[~is_state],
            copied_blocks=np.array(copied, np.int32).reshape(-1, 2),
        )

    def _state_pages(self, row: int, start: int, end: int) -> set[int]:
        """Pages of the state sets that a pass of a row reads and writes."""
        if not self._config.state_pages:
            return set()
        columns = self._config.columns
        held = self._state_columns[row]
        pages = set()
        for block in (start // BLOCK_SIZE, end // BLOCK_SIZE):
            assert columns.first_place + block in held, "a state set is not there"
            first = columns.first_page + held[columns.first_place + block] * columns.state_pages
            pages |= {held[first + i] for i in range(columns.state_pages)}
        return pages

    def _take_blocks(self, plan: StepPlan) -> None:
        for row, idx, block in zip(
            plan.block_rows, plan.block_indices, plan.block_ids, strict=True
        ):
            assert block != 0
            begin = int(idx) % self._config.max_blocks * BLOCK_SIZE
            is_computed = begin < self._computed.get(int(row), 0)
            assert not is_computed or self._blocks[int(row)].get(int(idx)) == block, (
                "what is computed stays"
            )
            self._blocks[int(row)][int(idx)] = int(block)
        self._copied = {}
        starts = dict(zip(plan.rows.tolist(), plan.starts.tolist(), strict=True))
        for source, target in plan.copied_blocks.tolist():
            # Rows behind the one that it is copied for may find it filled by that one's chunk.
            place = int(np.flatnonzero(plan.block_ids == target)[0])
            self._copied[int(plan.block_rows[place])] = self._block_of(plan, place)
            for held in np.flatnonzero(plan.block_ids == source).tolist():
                end = (self._block_of(plan, held) + 1) * BLOCK_SIZE
                assert end <= starts[int(plan.block_rows[held])], (
                    "copied from what the plan gives away"
                )
            assert all(writer != source for writer in plan.copied_blocks[:, 1].tolist())
        by_block = replace(plan, block_indices=plan.block_indices % self._config.max_blocks)
        written = set(by_block.written_blocks(BLOCK_SIZE).tolist())
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self._writable.setdefault(row, set()).update({block} & written)

    def _block_of(self, plan: StepPlan, update: int) -> int:
        """Index in the sequence of the block that an update of a plan's tables is of."""
        return int(plan.block_indices[update]) % self._config.max_blocks

    def _plan_row(
        self, plan: StepPlan, i: int, row: int, own_drafts: dict[int, int]
    ) -> tuple[int, int]:
        """Checks a row of a plan. Returns the first position that it computes, and the one behind
        the last."""
        start = int(plan.starts[i])
        end = int(plan.starts[i] + plan.counts[i])
        output_idx = int(plan.output_indices[i])
        num_drafts = 0 if plan.num_drafts is None else int(plan.num_drafts[i])
        assert not (plan.samples[i] and plan.holds[i])
        assert row not in self._uncertain, "planned before it is known how far it came"
        follows = plan.follows is not None and bool(plan.follows[i])
        assert follows == any(row in step for step in self._own_drafts), (
            "goes on behind what is not known"
        )
        if num_drafts:
            assert plan.samples[i] or plan.holds[i]
            columns = [column for _, column in self._columns_of(start, end)]
            assert set(columns) <= set(self._blocks[row]), "drafts have their pages"
            assert self._num_prompt[row] + output_idx + num_drafts < MAX_MODEL_LEN
        if follows:
            behind = start + 1 - self._known[row]
            assert behind >= 0, "planned as far as it may have come"
            start = start - behind
            end = end - behind
            output_idx = output_idx - behind
        self._advance_row(
            row, start, end - num_drafts, samples=bool(plan.samples[i]), output_idx=output_idx
        )
        if num_drafts:
            assert end - num_drafts == start + 1, "drafts are of rows that decode"
            if plan.draft_ids is None:
                assert plan.samples[i], "what the executor drafts is drawn at once"
                own_drafts[row] = num_drafts
            else:
                self._uncertain[row] = num_drafts
        if plan.holds[i]:
            assert end - num_drafts == self._known[row]
            self._held[row] = end - num_drafts
        return start, end

    def draw(self, plan: DrawPlan) -> int:
        drafts = plan.num_drafts if plan.num_drafts is not None else np.zeros_like(plan.rows)
        assert len(plan.rows) + drafts.sum() <= self._config.max_positions
        for row, position, output_idx, num_drafts in zip(
            plan.rows.tolist(),
            plan.positions.tolist(),
            plan.output_indices.tolist(),
            drafts.tolist(),
            strict=True,
        ):
            assert self._held.pop(row) == position == self._known[row]
            assert output_idx == position - self._num_prompt[row]
            assert num_drafts == self._uncertain.get(row, 0)
            self._known[row] += 1
        self._draws[plan.step] = plan.rows.tolist()
        self._check_room()
        return self._executor.draw(plan)

    def _check_room(self) -> None:
        """Results and staged words have a place for each plan in flight, and no more."""
        assert len(self._readers) + len(self._draws) <= 2 * self._config.async_depth + 1

    def retire(self, handle: int) -> StepResult:
        if handle in self._draws:
            rows = self._draws.pop(handle)
        else:
            self._readers.popleft()
            rows = self._sampled.popleft()
            own_drafts = self._own_drafts.popleft()
            self._check_own_drafts(rows, own_drafts, self._executor._in_flight[0].result)
        result = self._executor.retire(handle)
        assert result.token_ids.shape[0] == len(result.num_tokens) == len(rows)
        for row, num_tokens in zip(rows, result.num_tokens.tolist(), strict=True):
            if (num_drafts := self._uncertain.pop(row, None)) is not None:
                assert 1 <= num_tokens <= num_drafts + 1
                self.num_tokens_of_drafts[num_tokens] += 1
                # The first was counted when it was planned.
                self._known[row] += num_tokens - 1
                self._computed[row] = self._known[row] - 1
        return result

    def _check_own_drafts(self, rows: list[int], most: dict[int, int], result: StepResult) -> None:
        assert (result.num_drafts is not None) == bool(most)
        if result.num_drafts is not None:
            for row, num_drafts, num_tokens in zip(
                rows, result.num_drafts.tolist(), result.num_tokens.tolist(), strict=True
            ):
                assert 1 <= num_tokens <= num_drafts + 1 <= most.get(row, 0) + 1
                self.num_tokens_of_drafts[num_tokens] += num_drafts > 0

    def is_ready(self, handle: int) -> bool:
        return self._executor.is_ready(handle)

    def close(self) -> None:
        self._executor.close()

    def _take_rows(self, plan: StepPlan) -> None:
        rows_in_flight = {row for step in self._readers for rows in step.values() for row in rows}
        for row in plan.released:
            assert row not in rows_in_flight
            del self._blocks[row]
            del self._state_columns[row]
            self._writable.pop(row, None)
            if self._held.pop(row, None) is not None:
                # What it held is never drawn.
                self._uncertain.pop(row, None)
            assert row not in self._uncertain
        for admitted in plan.admitted:
            assert admitted.row not in self._blocks, "the row is taken"
            self._blocks[admitted.row] = {}
            self._state_columns[admitted.row] = {}
            self._known[admitted.row] = len(admitted.token_ids)
            self._num_prompt[admitted.row] = admitted.num_prompt_tokens
            self._computed.pop(admitted.row, None)

    def _advance_row(
        self, row: int, start: int, end: int, *, samples: bool, output_idx: int
    ) -> None:
        assert row in self._blocks
        assert row not in self._held, "computed before what it holds is drawn"
        assert start == self._computed.get(row, start), "no gap, nothing twice"
        assert start < end <= self._known[row], "only known tokens are computed"
        if row not in self._computed:
            assert start % BLOCK_SIZE == 0 or self._copied.get(row) == start // BLOCK_SIZE, (
                "begun within a block"
            )
        self._computed[row] = end
        if samples:
            assert end == self._known[row]
            assert output_idx == end - self._num_prompt[row]
            self._known[row] += 1
            assert self._known[row] <= MAX_MODEL_LEN
