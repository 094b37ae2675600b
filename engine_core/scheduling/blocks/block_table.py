"""Pages of each row of the request table, in columns: those of the first page group, then those of
the next."""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import NO_UPDATES, BoolArray, Int32Array
from ...kv.prefix_cache import HeldPages
from ..table.masks import RowIndices

NEVER = np.iinfo(np.int32).max


class BlockTable:
    """Rows are those of the request table. A page of group g that holds block i of a row's sequence
    stands in column g max_blocks + i."""

    def __init__(self, config: EngineConfig) -> None:
        num_rows = config.num_rows
        num_columns = config.num_page_groups * config.max_blocks
        self._block_size = config.block_size
        self._kinds = config.page_kinds
        self.capacity: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens for which the row has pages of every group."""
        self.firsts: Int32Array = np.zeros((len(self._kinds), num_rows), np.int32)
        """Index of the first block that a row still has, by kind of layer and row: no layer sees
        the blocks before it."""
        self._ends: Int32Array = np.zeros((len(self._kinds), num_rows), np.int32)
        """Index behind the row's last block, by kind."""
        self.hash_due: Int32Array = np.full(num_rows, NEVER, np.int32)
        """Number of computed tokens with which the row's next block is full and can be cached."""
        # Memory that is not touched costs nothing.
        self._pages: Int32Array = np.zeros((num_rows, num_columns), np.int32)
        # One index array is several times faster than a pair of them.
        self._flat: Int32Array = self._pages.reshape(-1)
        self._by_group = self._pages.reshape(num_rows, config.num_page_groups, config.max_blocks)
        self._first = np.arange(num_rows) * num_columns
        groups = np.arange(config.num_page_groups, dtype=np.int32)
        self._columns: Int32Array = groups * config.max_blocks
        """First column of each page group."""

    def seat(self, row: int, held: list[HeldPages]) -> Int32Array:
        """Gives the row these pages of each kind. Returns the columns of all of them."""
        for kind, each in enumerate(held):
            self.firsts[kind, row] = each.first
            self._ends[kind, row] = each.end
        self._note_ends(row)
        return self._write(row, held)

    def vacate(self, row: int) -> None:
        self.hash_due[row] = NEVER
        self.firsts[:, row] = self._ends[:, row] = 0

    def start_hashing(self, row: int, num_cached: int) -> None:
        """Notes that the row decodes, and that its first `num_cached` blocks were offered to the
        cache."""
        self.hash_due[row] = (num_cached + 1) * self._block_size

    def append(self, rows: RowIndices, pages: Int32Array) -> Int32Array:
        """Gives each row one more block, whose pages [rows, page groups] are given; returns their
        columns."""
        capacity = self.capacity[rows]
        columns: Int32Array = (capacity // self._block_size)[:, None] + self._columns
        self._flat[self._first[rows][:, None] + columns] = pages
        self.capacity[rows] = capacity + self._block_size
        # An index into one dimension is several times faster than into two.
        for ends in self._ends:
            ends[rows] += 1
        return columns

    def extend(self, row: int, added: list[HeldPages]) -> Int32Array:
        """Appends pages of each kind to the row's table; returns their columns."""
        self._ends[:, row] = [each.end for each in added]
        self._note_ends(row)
        return self._write(row, added)

    def take_filled(self, rows: RowIndices) -> tuple[list[list[int]], Int32Array]:
        """Pages of the blocks that rows have filled, by page group, and the positions after their
        last tokens; the next one is due a block later."""
        ends = self.hash_due[rows]
        self.hash_due[rows] = ends + self._block_size
        last = self._first[rows] + (ends // self._block_size - 1)
        return [self._flat[last + column].tolist() for column in self._columns.tolist()], ends

    def has_spare(self, rows: RowIndices, num_computed: Int32Array) -> BoolArray:
        """Whether rows have blocks after the one of the last of these positions."""
        has_spare: BoolArray = self.capacity[rows] - num_computed >= self._block_size
        return has_spare

    def take_spare(self, row: int, num_computed: int) -> list[int]:
        """Takes a row's pages of blocks after the one of its last position."""
        num_kept = -(-num_computed // self._block_size)
        spare = [
            page
            for kind, end in enumerate(self._ends[:, row].tolist())
            for page in self.between(row, kind, num_kept, end).pages
        ]
        self._ends[:, row] = num_kept
        self.capacity[row] = num_kept * self._block_size
        return spare

    def take_leading(self, row: int, kind: int, end: int) -> HeldPages:
        """Takes a row's pages of a kind before block `end` of its sequence."""
        first = int(self.firsts[kind, row])
        self.firsts[kind, row] = end
        return self.between(row, kind, first, end)

    def num_pages_of(self, row: int) -> int:
        return sum(self.num_pages_of_kind(row, kind) for kind in range(len(self._kinds)))

    def num_pages_by_window(self) -> dict[int, int]:
        """Pages of all rows, by the window of their layers."""
        counts = (self._ends - self.firsts).sum(axis=1).tolist()
        return {
            kind.window: count * len(kind.groups)
            for kind, count in zip(self._kinds, counts, strict=True)
        }

    def num_pages_of_kind(self, row: int, kind: int) -> int:
        """Pages of a row of a kind."""
        num_blocks = int(self._ends[kind, row] - self.firsts[kind, row])
        return num_blocks * len(self._kinds[kind].groups)

    def held(self, row: int) -> list[HeldPages]:
        """The row's pages of each kind."""
        bounds = zip(self.firsts[:, row].tolist(), self._ends[:, row].tolist(), strict=True)
        return [self.between(row, kind, *ends) for kind, ends in enumerate(bounds)]

    def pages_of(self, row: int) -> list[int]:
        """The row's pages of all kinds."""
        return [page for each in self.held(row) for page in each.pages]

    def between(self, row: int, kind: int, first: int, end: int) -> HeldPages:
        """Pages of a kind from one block of a row's sequence up to another."""
        groups = self._kinds[kind].groups
        of_kind = self._by_group[row, groups.start : groups.stop, first:end]
        pages: list[int] = of_kind.T.reshape(-1).tolist()
        return HeldPages(first, end, pages)

    def by_group(self, row: int, first: int, end: int) -> list[list[int]]:
        """Pages of each group from one block of a row's sequence up to another."""
        pages: list[list[int]] = self._by_group[row, :, first:end].tolist()
        return pages

    def ends(self, row: int) -> list[int]:
        """Number of blocks up to the row's last one, by kind of layer."""
        ends: list[int] = self._ends[:, row].tolist()
        return ends

    def pages_at(self, row: int, idx: int) -> list[int]:
        """Pages of a block of the row, by page group."""
        pages: list[int] = self._by_group[row, :, idx].tolist()
        return pages

    def _note_ends(self, row: int) -> None:
        # A model without a cache has room for every token.
        ends = self._ends[:, row]
        self.capacity[row] = ends.min() * self._block_size if ends.size else NEVER

    def _write(self, row: int, held: list[HeldPages]) -> Int32Array:
        """Writes pages of each kind into the row; returns their columns."""
        columns = [
            (np.arange(each.first, each.end)[:, None] + self._columns[kind.groups]).reshape(-1)
            for kind, each in zip(self._kinds, held, strict=True)
        ]
        joined: Int32Array = np.concatenate([NO_UPDATES, *columns]).astype(np.int32)
        self._pages[row, joined] = [page for each in held for page in each.pages]
        return joined
