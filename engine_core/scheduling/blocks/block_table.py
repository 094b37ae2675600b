"""Blocks of each row of the request table, in columns."""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices

NEVER = np.iinfo(np.int32).max


class BlockTable:
    """Rows are those of the request table."""

    def __init__(self, config: EngineConfig) -> None:
        num_rows = config.num_rows
        self._block_size = config.block_size
        self.capacity: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens that the row's blocks hold."""
        self.first: Int32Array = np.zeros(num_rows, np.int32)
        """Index of the row's first block that it still has: no layer sees those before it."""
        self.hash_due: Int32Array = np.full(num_rows, NEVER, np.int32)
        """Number of computed tokens with which the row's next block is full and can be cached."""
        max_blocks = -(-config.max_model_len // config.block_size)
        # Untouched pages cost nothing.
        self._block_ids: Int32Array = np.zeros((num_rows, max_blocks), np.int32)
        # One index array is several times faster than a pair of them.
        self._flat: Int32Array = self._block_ids.reshape(-1)
        self._first = np.arange(num_rows) * max_blocks

    def seat(self, row: int, first: int, blocks: list[int]) -> None:
        """Gives the row these blocks of its sequence, from index `first` on."""
        end = first + len(blocks)
        self.first[row] = first
        self.capacity[row] = end * self._block_size
        self._block_ids[row, first:end] = blocks

    def vacate(self, row: int) -> None:
        self.hash_due[row] = NEVER

    def start_hashing(self, row: int, num_cached: int) -> None:
        """Notes that the row decodes, and that its first `num_cached` blocks were offered to the
        cache."""
        self.hash_due[row] = (num_cached + 1) * self._block_size

    def append(self, rows: RowIndices, blocks: Int32Array) -> Int32Array:
        """Gives each row one more block; returns its index in the row's sequence."""
        capacity = self.capacity[rows]
        idx: Int32Array = capacity // self._block_size
        self._flat[self._first[rows] + idx] = blocks
        self.capacity[rows] = capacity + self._block_size
        return idx

    def extend(self, row: int, blocks: list[int]) -> Int32Array:
        """Gives the row more blocks; returns their indices in the row's sequence."""
        end = self.end(row)
        indices = np.arange(end, end + len(blocks), dtype=np.int32)
        self._block_ids[row, indices] = blocks
        self.capacity[row] += len(blocks) * self._block_size
        return indices

    def take_filled(self, rows: RowIndices) -> tuple[list[int], Int32Array]:
        """Blocks that rows have filled, and the positions behind their last tokens; the next one is
        due a block later."""
        ends = self.hash_due[rows]
        self.hash_due[rows] = ends + self._block_size
        blocks: list[int] = self._flat[self._first[rows] + (ends // self._block_size - 1)].tolist()
        return blocks, ends

    def has_spare(self, rows: RowIndices, num_computed: Int32Array) -> BoolArray:
        """Whether rows have blocks behind the one of the last of these positions."""
        has_spare: BoolArray = self.capacity[rows] - num_computed >= self._block_size
        return has_spare

    def take_spare(self, row: int, num_computed: int) -> list[int]:
        """Takes a row's blocks behind the one of its last position."""
        num_kept = -(-num_computed // self._block_size)
        spare = self.between(row, num_kept, self.end(row))
        self.capacity[row] = num_kept * self._block_size
        return spare

    def take_leading(self, row: int, end: int) -> list[int]:
        """Takes a row's blocks before index `end` of its sequence."""
        first = int(self.first[row])
        self.first[row] = end
        return self.between(row, first, end)

    def num_blocks_of(self, row: int) -> int:
        return self.end(row) - int(self.first[row])

    def blocks_of(self, row: int) -> list[int]:
        return self.between(row, int(self.first[row]), self.end(row))

    def between(self, row: int, first: int, end: int) -> list[int]:
        """Blocks of a row from one index of its sequence up to another."""
        blocks: list[int] = self._block_ids[row, first:end].tolist()
        return blocks

    def end(self, row: int) -> int:
        """Index behind the row's last block."""
        return int(self.capacity[row]) // self._block_size

    def block_at(self, row: int, idx: int) -> int:
        return int(self._block_ids[row, idx])
