"""State sets of rows: by block of its sequence, which sets a row has, and where they stand in its
block table. Knows no cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...config import EngineConfig
from ...executor import Int32Array
from ...kv.block_pool import BlockPool
from ..table.masks import RowIndices
from .block_table import NEVER


@dataclass(slots=True)
class StateSet:
    place: int
    """One of the row's places for sets in its block table."""
    pages: list[int]
    block: int
    """Index of the block at whose beginning the state is."""
    is_kept: bool = False
    """Whether it stays cached when its row needs it no longer."""


class StateSets:
    """A row has the sets of the blocks in which passes of steps in flight begin and end, and that
    of the block in which the next one begins."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.num_pages = config.state_pages
        """Pages of a set."""
        self._num_places = config.columns.num_sets
        self._first_place = config.columns.first_place
        first_pages = config.columns.first_page + self.num_pages * np.arange(self._num_places)
        self._columns: Int32Array = first_pages[:, None] + np.arange(self.num_pages)
        """[places, pages] columns of pages."""
        self._block_size = config.block_size
        self._pool = pool
        self.oldest: Int32Array = np.full(config.num_rows, NEVER, np.int32)
        """Block of the row's first set."""
        self.capacity: Int32Array = np.full(config.num_rows, -1, np.int32)
        """The most tokens of the row, computed ones included, up to which its newest set serves:
        behind the last of them it needs that of another block."""
        self._sets: list[dict[int, StateSet]] = [{} for _ in range(config.num_rows)]
        """Keyed by row, its sets by block, in ascending order."""

    def newest(self, row: int) -> int:
        """Block of the row's last set."""
        return int(self.capacity[row]) // self._block_size

    def of_block(self, row: int, block: int) -> StateSet | None:
        return self._sets[row].get(block)

    def blocks_of(self, row: int) -> Iterator[tuple[int, StateSet]]:
        """The row's sets with their blocks, the last one first."""
        return reversed(self._sets[row].items())

    def pages_of_sets(self) -> Iterator[list[int]]:
        """Pages of each set of all rows."""
        for sets in self._sets:
            for each in sets.values():
                yield each.pages

    def pages_of(self, row: int) -> list[int]:
        """Pages of all sets of a row."""
        return [page for each in self._sets[row].values() for page in each.pages]

    def num_pages_of(self, row: int) -> int:
        return len(self._sets[row]) * self.num_pages

    @property
    def num_all_pages(self) -> int:
        """Pages of all rows."""
        return sum(map(len, self._sets)) * self.num_pages

    def add(self, row: int, block: int) -> tuple[Int32Array, list[int]]:
        """Gives a row the set of a block after its others, of free pages. Returns columns of its
        block table, and what stands there."""
        columns, values = self.add_each(np.array([row]), np.array([block]))
        return columns[0], values[0].tolist()

    def add_each(self, rows: RowIndices, blocks: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Gives each row the set of a block after its others, of free pages. Returns columns of
        their block tables, and what stands there: [R, 1 + pages of a set], the place first."""
        pages = np.array(self._pool.allocate(rows.size * self.num_pages), np.int32)
        pages = pages.reshape(rows.size, self.num_pages)
        places = np.empty(rows.size, np.int32)
        added = enumerate(zip(rows.tolist(), blocks.tolist(), pages.tolist(), strict=True))
        for i, (row, block, of_set) in added:
            sets = self._sets[row]
            taken = {each.place for each in sets.values()}
            place = places[i] = next(i for i in range(self._num_places) if i not in taken)
            if not sets:
                self.oldest[row] = block
            sets[block] = StateSet(int(place), of_set, block)
        self.capacity[rows] = (blocks + 1) * self._block_size - 1
        columns = np.empty((rows.size, 1 + self.num_pages), np.int32)
        columns[:, 0] = self._first_place + blocks
        columns[:, 1:] = self._columns[places]
        return columns, np.concatenate((places[:, None], pages), axis=1)

    def lacking(self, rows: RowIndices, num_tokens: Int32Array) -> RowIndices:
        """Rows that have no set of the block behind num_tokens[i] of their tokens."""
        lacking: RowIndices = rows[num_tokens > self.capacity[rows]]
        return lacking

    def take_before(self, row: int, block: int) -> list[StateSet]:
        """Takes a row's sets of blocks before this one."""
        sets = self._sets[row]
        taken = [sets.pop(each) for each in list(sets) if each < block]
        self.oldest[row] = next(iter(sets), NEVER)
        return taken

    def take_behind(self, row: int, block: int) -> list[StateSet]:
        """Takes a row's sets of blocks after this one."""
        sets = self._sets[row]
        taken = [sets.pop(each) for each in list(sets) if each > block]
        if taken:
            self.capacity[row] = (block + 1) * self._block_size - 1
        return taken

    def take_all(self, row: int) -> list[StateSet]:
        """Takes all sets of a row, which has left."""
        taken = list(self._sets[row].values())
        self._sets[row].clear()
        self.oldest[row] = NEVER
        self.capacity[row] = -1
        return taken
