"""State sets of rows: which sets a row has, by block of its sequence, and their columns in its
block table. Knows no cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array
from ...kv.block_pool import BlockPool
from ..table.masks import RowIndices
from .block_table import NEVER

NO_SET = -1
"""Stands for the block of a place without a set."""


class TakenSets(NamedTuple):
    """S sets that rows no longer have, by row and then by block."""

    at: RowIndices
    """[S] index of each one's row among the rows that they were taken of."""
    blocks: Int32Array
    """[S] blocks at whose beginning the states are."""
    pages: Int32Array
    """[S, pages of a set]"""
    are_kept: BoolArray
    """[S] whether each stays cached."""


class StateSets:
    """A row has the sets of the blocks in which passes of steps in flight begin and end, and that
    of the block in which the next one begins."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.num_pages = config.state_pages
        """Pages of a set."""
        num_places = config.columns.num_sets
        self._first_place = config.columns.first_place
        first_pages = config.columns.first_page + self.num_pages * np.arange(num_places)
        self._columns: Int32Array = first_pages[:, None] + np.arange(self.num_pages)
        """[places, pages] columns of pages."""
        self._block_size = config.block_size
        self._pool = pool
        self.oldest: Int32Array = np.full(config.num_rows, NEVER, np.int32)
        """Block of the row's first set."""
        self.capacity: Int32Array = np.full(config.num_rows, -1, np.int32)
        """Number of tokens, computed ones included, up to which the row's newest set is sufficient;
        the tokens after them need the set of another block."""
        shape = config.num_rows, num_places
        self._blocks: Int32Array = np.full(shape, NO_SET, np.int32)
        """[rows, places] block whose first token each set's state precedes."""
        self._pages: Int32Array = np.zeros((*shape, self.num_pages), np.int32)
        self._are_kept: BoolArray = np.zeros(shape, np.bool_)
        """[rows, places] whether a set stays cached when its row no longer needs it."""

    def of_block(self, row: int, block: int) -> list[int]:
        """Pages of the row's set of a block; empty: it has none."""
        pages: list[int] = self._pages[row][self._blocks[row] == block].reshape(-1).tolist()
        return pages

    def keep(self, row: int, block: int) -> None:
        """Keeps the row's set of a block cached when its row no longer needs it."""
        self._are_kept[row] |= self._blocks[row] == block

    def blocks_of(self, row: int) -> list[int]:
        """Blocks of the row's sets, the last one first."""
        blocks = self._blocks[row]
        return sorted(blocks[blocks != NO_SET].tolist(), reverse=True)

    def first_pages(self) -> list[int]:
        """The first page of each set of all rows."""
        pages: list[int] = self._pages[self._blocks != NO_SET, 0].tolist()
        return pages

    def pages_of(self, row: int) -> list[int]:
        """Pages of all sets of a row."""
        pages: list[int] = self._pages[row][self._blocks[row] != NO_SET].reshape(-1).tolist()
        return pages

    def num_pages_of(self, row: int) -> int:
        return int(np.count_nonzero(self._blocks[row] != NO_SET)) * self.num_pages

    @property
    def num_all(self) -> int:
        """Sets of all rows."""
        return int(np.count_nonzero(self._blocks != NO_SET))

    def add(self, row: int, block: int) -> tuple[Int32Array, list[int]]:
        """Gives a row the state set of one more block, made of free pages. Returns the columns of
        its block table, and their contents."""
        columns, values = self.add_each(np.array([row]), np.array([block]))
        return columns[0], values[0].tolist()

    def add_each(self, rows: RowIndices, blocks: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Gives each row the state set of one more block, made of free pages. Returns the columns
        of their block tables, and their contents [R, 1 + pages of a set], the place first."""
        pages = np.array(self._pool.allocate(rows.size * self.num_pages), np.int32)
        pages = pages.reshape(rows.size, self.num_pages)
        is_free = self._blocks[rows] == NO_SET
        assert is_free.any(1).all()
        places = is_free.argmax(1)
        self.oldest[rows] = np.where(is_free.all(1), blocks, self.oldest[rows])
        self._blocks[rows, places] = blocks
        self._pages[rows, places] = pages
        self.capacity[rows] = (blocks + 1) * self._block_size - 1
        columns = np.empty((rows.size, 1 + self.num_pages), np.int32)
        columns[:, 0] = self._first_place + blocks
        columns[:, 1:] = self._columns[places]
        values = np.empty_like(columns)
        values[:, 0] = places
        values[:, 1:] = pages
        return columns, values

    def take_before(self, rows: RowIndices, blocks: Int32Array) -> TakenSets:
        """Takes the sets of each row of blocks before blocks[i]."""
        own = self._blocks[rows]
        taken = self._take(rows, (own != NO_SET) & (own < blocks[:, None]))
        left = self._blocks[rows]
        self.oldest[rows] = np.where(left == NO_SET, NEVER, left).min(1)
        return taken

    def take_behind(self, rows: RowIndices, blocks: Int32Array) -> TakenSets:
        """Takes the sets of each row of blocks after blocks[i]."""
        taken = self._take(rows, self._blocks[rows] > blocks[:, None])
        shorter = np.unique(taken.at)
        self.capacity[rows[shorter]] = (blocks[shorter] + 1) * self._block_size - 1
        return taken

    def take_all(self, row: int) -> TakenSets:
        """Takes all sets of a row, which has left."""
        taken = self._take(np.array([row]), self._blocks[row : row + 1] != NO_SET)
        self.oldest[row] = NEVER
        self.capacity[row] = -1
        return taken

    def _take(self, rows: RowIndices, are_taken: BoolArray) -> TakenSets:
        """Takes sets of rows; are_taken [R, places]."""
        at, places = are_taken.nonzero()
        found = rows[at], places
        blocks = self._blocks[found]
        order = np.lexsort((blocks, at))
        taken = TakenSets(
            at[order], blocks[order], self._pages[found][order], self._are_kept[found][order]
        )
        self._blocks[found] = NO_SET
        self._are_kept[found] = False
        return taken
