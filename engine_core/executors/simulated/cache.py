"""The KV cache of a simulated executor: an entry of 64 bits for each token, which stands for the
whole sequence that leads to it."""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ..model.shared_kv import SharedMemory
from .hashes import UInt64Array, hashes
from .model import SimulatedModel
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
        num_blocks = -(-config.max_model_len // config.block_size)
        self._block_table: Int32Array = np.zeros((config.num_rows, num_blocks), np.int32)

    @property
    def blocks(self) -> UInt64Array:
        """[num_blocks, block_size]"""
        return self.kv.reshape(-1, self._block_size)

    def apply(self, plan: StepPlan) -> None:
        """Gives rows their blocks, and copies blocks."""
        self._block_table[plan.block_rows, plan.block_indices] = plan.block_ids
        blocks = self.blocks
        blocks[plan.copied_blocks[:, 1]] = blocks[plan.copied_blocks[:, 0]]

    def entries(self, rows: Int32Array | int, positions: Int32Array) -> UInt64Array:
        """The entries of positions of rows, by their block tables."""
        return self.kv[self._slots(rows, positions)]

    def last_entries(self, rows: Int32Array, at: Int32Array) -> UInt64Array:
        """Entries of rows[i] up to position at[i] that a token may follow from, [S, n]; 0 before
        the first position."""
        before: Int32Array = np.arange(max(self._model.window, 1) - 1, -1, -1, dtype=np.int32)
        positions: Int32Array = at[:, None] - before
        entries: UInt64Array = self.entries(rows[:, None], positions) * (positions >= 0)
        return entries

    def seen(self, rows: Int32Array, at: Int32Array) -> UInt64Array:
        """Sums of the entries that tokens behind positions at[i] of rows[i] follow from, [S]."""
        return self._model.seen(self.last_entries(rows, at))[:, 0]

    def write(self, plan: StepPlan) -> None:
        """Rows of one token at once, then the others in the plan's order: a row that joins with
        this plan may read what another writes in it."""
        is_alone = plan.counts != 1
        if plan.admitted:
            is_alone |= np.isin(plan.rows, [admitted.row for admitted in plan.admitted])
        together = ~is_alone
        self._write_tokens(plan.rows[together], plan.starts[together])
        for i in np.flatnonzero(is_alone).tolist():
            self._write_chunk(int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i]))

    def _write_tokens(self, rows: Int32Array, positions: Int32Array) -> None:
        # Position −1 reads some entry, which the first position does not count.
        before = self.entries(rows, positions - 1) * (positions > 0)
        self.kv[self._slots(rows, positions)] = before + hashes(
            self._table.token_ids[rows, positions], positions
        )

    def _write_chunk(self, row: int, start: int, count: int) -> None:
        positions = np.arange(start, start + count, dtype=np.int32)
        before = self.entries(row, positions[:1] - 1) if start else np.zeros(1, np.uint64)
        added = hashes(self._table.token_ids[row, start : start + count], positions)
        self.kv[self._slots(row, positions)] = before + np.cumsum(added)

    def _slots(self, rows: Int32Array | int, positions: Int32Array) -> Int32Array:
        idx = positions // self._block_size
        slots: Int32Array = positions + (self._block_table[rows, idx] - idx) * self._block_size
        return slots

    def verify(self, plan: StepPlan, i: int) -> None:
        """Compares the entries of the plan's i-th row that its next token follows from, read as
        attention would, with its tokens."""
        row = int(plan.rows[i])
        num_tokens = int(plan.starts[i] + plan.counts[i])
        positions = np.arange(num_tokens, dtype=np.int32)
        should_be = np.cumsum(hashes(self._table.token_ids[row, :num_tokens], positions))
        positions = positions[-self._model.window :]
        should_be = should_be[-self._model.window :]
        wrong = np.flatnonzero(self.entries(row, positions) != should_be)
        assert not wrong.size, (
            f"step {plan.step}, row {row}: KV of positions {wrong[:8].tolist()} is not its own"
        )
