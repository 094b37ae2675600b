"""Progress of each rank of an engine, in memory that the ranks write and the executor reads. Knows
no plans."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from ..system.ring import anonymous_memory
from .rank_facts import RankFigures

IDLE, COMPUTES, WAITS = range(3)
"""States of a rank: idle, computing a plan, waiting for another rank."""
STATE_NAMES = ("waits for a plan", "computes", "waits for another rank")
_STATE, _NUM_PLANS, _BUSY_NS, _WAITED_NS, _NUM_WAITS, _NUM_SAVED, _NUM_LOADED, _NUM_COLUMNS = range(
    8
)
_Rows = np.ndarray[Any, np.dtype[np.int64]]


def create_board(num_ranks: int) -> int:
    """A descriptor of the memory, to be inherited."""
    return anonymous_memory("headwater-ranks", 8 * num_ranks * _NUM_COLUMNS)


class Board:
    """A row of numbers for each rank, which that rank alone writes, or the host that it is on. A
    number is written at once."""

    def __init__(self, memory: int) -> None:
        size = os.fstat(memory).st_size
        self._rows: _Rows = np.frombuffer(mmap.mmap(memory, size), np.int64).reshape(
            -1, _NUM_COLUMNS
        )

    def state(self, rank: int) -> int:
        return int(self._rows[rank, _STATE])

    def num_waits(self, rank: int) -> int:
        """How often the rank has begun to wait for others."""
        return int(self._rows[rank, _NUM_WAITS])

    def set_state(self, rank: int, state: int) -> None:
        self._rows[rank, _STATE] = state
        if state == WAITS:
            self._rows[rank, _NUM_WAITS] += 1

    def note_plan(self, rank: int, busy_seconds: float, waited_seconds: float) -> None:
        """Notes that a rank has computed a plan; `waited_seconds` is the sum over all plans so
        far."""
        row = self._rows[rank]
        row[_NUM_PLANS] += 1
        row[_BUSY_NS] += int(1e9 * busy_seconds)
        row[_WAITED_NS] = int(1e9 * waited_seconds)

    def note_copies(self, rank: int, num_saved: int, num_loaded: int) -> None:
        """Blocks that the rank has copied to host memory and back, so far."""
        self._rows[rank, _NUM_SAVED] = num_saved
        self._rows[rank, _NUM_LOADED] = num_loaded

    def rows(self, first_rank: int, count: int) -> bytes:
        """Counters of some ranks as bytes, for another host."""
        return self._rows[first_rank : first_rank + count].tobytes()

    def set_rows(self, first_rank: int, count: int, rows: bytes) -> bool:
        """Copies the rows of another host's ranks. Returns False if they have another size."""
        if len(rows) != 8 * count * _NUM_COLUMNS:
            return False
        self._rows[first_rank : first_rank + count] = np.frombuffer(rows, np.int64).reshape(
            count, _NUM_COLUMNS
        )
        return True

    @property
    def num_saved(self) -> int:
        """Blocks that all ranks have copied to host memory."""
        return int(self._rows[:, _NUM_SAVED].min())

    @property
    def num_loaded(self) -> int:
        """Blocks that all ranks have copied back."""
        return int(self._rows[:, _NUM_LOADED].min())

    def figures(self) -> list[RankFigures]:
        rows: list[list[int]] = self._rows.tolist()
        return [
            RankFigures(row[_NUM_PLANS], row[_BUSY_NS] / 1e9, row[_WAITED_NS] / 1e9) for row in rows
        ]
