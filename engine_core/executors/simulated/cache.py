"""The KV cache of a simulated executor: an entry of 64 bits for each token and page group, which
stands for the whole sequence that leads to it."""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ..model.shared_kv import SharedMemory
from .hashes import UInt64Array, hashes
from .memory import SimulatedMemory
from .model import SimulatedModel, salt_of_group
from .states import SimulatedStates
from .table import SimulatedTable

ENTRY_BYTES = 8
"""Bytes that stand for a token's keys and values."""


class SimulatedCache:
    def __init__(
        self,
        config: EngineConfig,
        table: SimulatedTable,
        model: SimulatedModel,
        memory: SharedMemory | None,
    ) -> None:
        """`memory` holds the entries where other engines copy from the cache."""
        self._table = table
        self._model = model
        self._block_size = config.block_size
        self.kv: UInt64Array = np.zeros(config.num_blocks * config.block_size, np.uint64)
        if memory is not None:
            self.kv = memory.blocks.reshape(-1).view(np.uint64)
        self.memory = SimulatedMemory(self.kv)
        """Memory that sleep gives back."""
        self._groups = range(config.num_page_groups)
        self._salts = [np.uint64(salt_of_group(group)) for group in self._groups]
        self._max_blocks = config.max_blocks
        self._block_table: Int32Array = np.zeros(
            (config.num_rows, config.columns.num_columns), np.int32
        )
        self._states = SimulatedStates(config, table, self.blocks, self._block_table)

    @property
    def blocks(self) -> UInt64Array:
        """[pages, block_size]"""
        return self.kv.reshape(-1, self._block_size)

    def apply(self, plan: StepPlan) -> None:
        """Gives rows their pages, and copies pages."""
        self._block_table[plan.block_rows, plan.block_indices] = plan.block_ids
        blocks = self.blocks
        blocks[plan.copied_blocks[:, 1]] = blocks[plan.copied_blocks[:, 0]]

    def entries(self, rows: Int32Array | int, positions: Int32Array, group: int = 0) -> UInt64Array:
        """The entries of positions of rows in a page group, by their block tables."""
        return self.kv[self._slots(rows, positions, group)]

    def last_entries(
        self, rows: Int32Array, at: Int32Array, count: int, group: int = 0
    ) -> UInt64Array:
        """The last `count` entries of rows[i] up to position at[i] in a page group, [S, count]; 0
        before the first position. A count of 0: all of the longest row."""
        count = count or int(at.max(initial=0)) + 1
        before: Int32Array = np.arange(count - 1, -1, -1, dtype=np.int32)
        positions: Int32Array = at[:, None] - before
        entries: UInt64Array = self.entries(rows[:, None], positions, group) * (positions >= 0)
        return entries

    def seen(self, rows: Int32Array, at: Int32Array) -> UInt64Array:
        """Sums of the entries that tokens behind positions at[i] of rows[i] follow from, [S]."""
        parts = [
            self.last_entries(rows, at, self._model.num_seen(group), group).sum(1, dtype=np.uint64)
            for group in self._groups
        ]
        if self._states.are_kept:
            parts.append(self._states.behind(rows, at))
        seen: UInt64Array = np.sum(parts, axis=0, dtype=np.uint64)
        return seen

    def write(self, plan: StepPlan) -> None:
        """Writes rows of one token at once, then the others in the plan's order: a row admitted in
        this plan may read what another one writes in it."""
        is_alone = plan.counts != 1
        if plan.admitted:
            is_admitted = np.zeros(len(self._block_table), np.bool_)
            is_admitted[[admitted.row for admitted in plan.admitted]] = True
            is_alone |= is_admitted[plan.rows]
        if not is_alone.all():
            together = ~is_alone
            self._write_tokens(plan.rows[together], plan.starts[together])
        for i in np.flatnonzero(is_alone).tolist():
            self._write_chunk(int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i]))
        if self._states.are_kept:
            self._states.write(plan)

    def _write_tokens(self, rows: Int32Array, positions: Int32Array) -> None:
        added = hashes(self._table.token_ids[rows, positions], positions)
        for group in self._groups:
            # Position −1 reads some entry, which the first position does not count.
            before = self.entries(rows, positions - 1, group)
            before = np.where(positions > 0, before, self._salts[group])
            self.kv[self._slots(rows, positions, group)] = before + added

    def _write_chunk(self, row: int, start: int, count: int) -> None:
        positions = np.arange(start, start + count, dtype=np.int32)
        added = np.cumsum(hashes(self._table.token_ids[row, start : start + count], positions))
        for group in self._groups:
            before = self._salts[group]
            if start:
                before = self.entries(row, positions[:1] - 1, group)[0]
            self.kv[self._slots(row, positions, group)] = before + added

    def _slots(self, rows: Int32Array | int, positions: Int32Array, group: int) -> Int32Array:
        idx = positions // self._block_size
        pages = self._block_table[rows, group * self._max_blocks + idx]
        slots: Int32Array = positions + (pages - idx) * self._block_size
        return slots

    def verify(self, plan: StepPlan, i: int) -> None:
        """Compares the entries of the plan's i-th row that layers see, read as attention would,
        with its tokens."""
        row = int(plan.rows[i])
        num_tokens = int(plan.starts[i] + plan.counts[i])
        positions = np.arange(num_tokens, dtype=np.int32)
        known = hashes(self._table.token_ids[row, :num_tokens], positions)
        should_be = np.cumsum(known)
        for group, salt in enumerate(self._salts):
            window = self._model.windows[group]
            found = self.entries(row, positions[-window:], group)
            wrong = np.flatnonzero(found != should_be[-window:] + salt)
            assert not wrong.size, (
                f"step {plan.step}, row {row}: KV of positions {positions[-window:][wrong[:8]]} in "
                f"page group {group} is not its own"
            )
        # Steps whose time is measured give rows no sets: these share page 0.
        if self._states.are_kept and self._states.has_set(row, num_tokens):
            states = self._states.states(row, num_tokens)
            assert (states == self._states.expected(known)).all(), (
                f"step {plan.step}, row {row}: the state behind {num_tokens} tokens is not its own"
            )
