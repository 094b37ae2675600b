"""State sets of a simulated executor: what a state layer would keep of a sequence, as sums.

A unit of a set takes two pages: the state at the border, a sum over all tokens before it, and the
tail, a number for each token of the block.
"""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from .hashes import UInt64Array, hashes
from .model import salt_of_unit
from .table import SimulatedTable

PAGES_OF_UNIT = 2


def num_units(state_pages: int) -> int:
    """Units of a set of so many pages."""
    return state_pages // PAGES_OF_UNIT


class SimulatedStates:
    def __init__(
        self,
        config: EngineConfig,
        table: SimulatedTable,
        blocks: UInt64Array,
        block_table: Int32Array,
    ) -> None:
        """blocks [pages, block_size] are the memory of all pages, block_table [rows, columns] says
        which are whose."""
        self._table = table
        self._blocks = blocks
        self._block_table = block_table
        self._block_size = config.block_size
        self._columns = config.columns
        self._salts: UInt64Array = np.array(
            [salt_of_unit(unit) for unit in range(num_units(config.state_pages))], np.uint64
        )

    @property
    def are_kept(self) -> bool:
        """Whether the model has state layers."""
        return bool(self._salts.size)

    def write(self, plan: StepPlan) -> None:
        """Writes tails and states of the rows of a plan."""
        ends = plan.starts + plan.counts
        # Most rows decode a token within a block.
        is_inner = (plan.counts == 1) & (ends % self._block_size > 0)
        if is_inner.any():
            self._write_tokens(plan.rows[is_inner], plan.starts[is_inner])
        others = ~is_inner
        bounds = (each[others].tolist() for each in (plan.rows, plan.starts, ends))
        for row, start, end in zip(*bounds, strict=True):
            self._write(row, start, end)

    def _write_tokens(self, rows: Int32Array, positions: Int32Array) -> None:
        """Writes the tails of one token of each row."""
        blocks, offsets = np.divmod(positions, self._block_size)
        tails = self._pages_of(rows, blocks)[:, 1::PAGES_OF_UNIT]
        added = hashes(self._table.token_ids[rows, positions], positions)
        self._blocks[tails, offsets[:, None]] = added[:, None]

    def _write(self, row: int, start: int, end: int) -> None:
        size = self._block_size
        first = start // size
        last = end // size
        positions = np.arange(start, end, dtype=np.int32)
        added = hashes(self._table.token_ids[row, start:end], positions)
        tails = self._tails(row, first)
        in_first = added[: (first + 1) * size - start]
        offset = start - first * size
        tails[:, offset : offset + in_first.size] = in_first
        self._put_tails(row, first, tails)
        if last == first:
            return
        borders = self._borders(row, first) + tails.sum(1, dtype=np.uint64)
        behind = added[in_first.size :]
        num_whole = (last - first - 1) * size
        borders += behind[:num_whole].sum(dtype=np.uint64)
        self._blocks[self._pages(row, last)[::PAGES_OF_UNIT], 0] = borders
        tails = self._tails(row, last)
        tails[:, : end - last * size] = behind[num_whole:]
        self._put_tails(row, last, tails)

    def behind(self, rows: Int32Array, at: Int32Array) -> UInt64Array:
        """[S] sums of all units' states behind positions at[i] of rows[i]."""
        blocks, num_tail = np.divmod(at + 1, self._block_size)
        pages = self._pages_of(rows, blocks)
        borders = np.where(
            blocks[:, None] > 0, self._blocks[pages[:, ::PAGES_OF_UNIT], 0], self._salts
        )
        tails = self._blocks[pages[:, 1::PAGES_OF_UNIT]]
        is_read = np.arange(self._block_size) < num_tail[:, None, None]
        sums: UInt64Array = borders.sum(1, dtype=np.uint64) + tails.sum(
            (1, 2), dtype=np.uint64, where=is_read
        )
        return sums

    def states(self, row: int, end: int) -> UInt64Array:
        """[units] states of a row after its first `end` tokens."""
        block, num_tail = divmod(end, self._block_size)
        tails = self._tails(row, block)[:, :num_tail]
        states: UInt64Array = self._borders(row, block) + tails.sum(1, dtype=np.uint64)
        return states

    def has_set(self, row: int, end: int) -> bool:
        """Whether a row has pages for the states behind its first `end` tokens."""
        return bool(self._pages(row, end // self._block_size).all())

    def expected(self, known: UInt64Array) -> UInt64Array:
        """[units] states after tokens with these hashes."""
        states: UInt64Array = self._salts + known.sum(dtype=np.uint64)
        return states

    def _borders(self, row: int, block: int) -> UInt64Array:
        """[units] states before a block. Nothing is read before the first one."""
        if not block:
            return self._salts
        borders: UInt64Array = self._blocks[self._pages(row, block)[::PAGES_OF_UNIT], 0]
        return borders

    def _tails(self, row: int, block: int) -> UInt64Array:
        """[units, block_size]"""
        tails: UInt64Array = self._blocks[self._pages(row, block)[1::PAGES_OF_UNIT]]
        return tails

    def _put_tails(self, row: int, block: int, tails: UInt64Array) -> None:
        self._blocks[self._pages(row, block)[1::PAGES_OF_UNIT]] = tails

    def _pages(self, row: int, block: int) -> Int32Array:
        """Pages of a block's set that units take."""
        columns = self._columns
        place = self._block_table[row, columns.first_place + block]
        first = columns.first_page + place * columns.state_pages
        pages: Int32Array = self._block_table[row, first : first + PAGES_OF_UNIT * self._salts.size]
        return pages

    def _pages_of(self, rows: Int32Array, blocks: Int32Array) -> Int32Array:
        """[R, pages] like `_pages`, of a block of each row."""
        columns = self._columns
        places = self._block_table[rows, columns.first_place + blocks]
        first = columns.first_page + places * columns.state_pages
        of_units = first[:, None] + np.arange(PAGES_OF_UNIT * self._salts.size)
        pages: Int32Array = self._block_table[rows[:, None], of_units]
        return pages
