"""Inputs of a draw under masks on a GPU: a few staged words, and masks from the table of the
engine."""

from __future__ import annotations

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array
from ..device.locked_memory import LockedMemory, is_mapped
from ..device.step_shapes import aligned
from ..table.by_position import DrawPositions

_NUM_COLUMNS = 5
_HEAD = 4
"""Number of header words before the words of rows. The first header word is the place of the
results."""
_MOST_GAPS = 4
"""Most table rows copied for one drawn row: copying a contiguous range takes less time than copying
row by row."""


class MaskTable:
    """A mask table that draws read."""

    def __init__(self, masks: Int32Array, *, is_locked: bool) -> None:
        self.masks = masks
        self.source = torch.from_numpy(masks)
        self._locks = [LockedMemory(self.source)] if is_locked else []

    def close(self) -> None:
        while self._locks:
            self._locks.pop().release()


NO_MASKS = MaskTable(np.empty((0, 0, 0), np.int32), is_locked=False)


class DrawBuffers:
    """One buffer on the device, and a pinned one for each draw in flight."""

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device) -> None:
        stride = aligned(config.max_positions)
        self._is_gpu = device.type == "cuda"
        self._num_rows = config.num_rows
        self._words = torch.zeros(_HEAD + _NUM_COLUMNS * stride, dtype=torch.int32, device=device)
        self._pinned = [
            torch.zeros(len(self._words), dtype=torch.int32, pin_memory=self._is_gpu)
            for _ in range(config.most_in_flight)
        ]
        self._staged: list[Int32Array] = [each.numpy() for each in self._pinned]
        self.first_result = self._words[:1]
        # A row of each: table rows or -1, positions before the token, output indices, and where
        # masks and logits lie.
        self._draws = self._words[_HEAD:].view(_NUM_COLUMNS, -1)
        # Room for the rows between drawn rows, which are copied with them, but never for more than
        # all rows.
        num_masks = min(
            _MOST_GAPS * config.max_positions, config.num_rows * (config.max_draft_tokens + 1)
        )
        self._masks = torch.full(
            (num_masks, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device
        )
        self._table = NO_MASKS

    def send(
        self, step: int, draw: DrawPositions, table: Int32Array, num_draws: int, first_result: int
    ) -> None:
        """Copies a draw to the device, padded to `num_draws`, with its masks of the table
        [positions, rows, words]."""
        turn = step % len(self._staged)
        count = len(draw.rows)
        staged = self._staged[turn]
        staged[0] = first_result
        draws = staged[_HEAD:].reshape(_NUM_COLUMNS, -1)
        draws[:, count:num_draws] = [[-1], [0], [0], [0], [0]]
        masks_at = self._copy_masks(draw, table)
        states_at = held_at(draw.rows, draw.place, self._num_rows)
        draws[:, :count] = draw.rows, draw.positions - 1, draw.output_indices, masks_at, states_at
        self._words.copy_(self._pinned[turn], non_blocking=True)

    def clear(self, num_draws: int) -> None:
        """A draw that is all padding."""
        self._words.zero_()
        self._draws[0, :num_draws].fill_(-1)

    def draws(self, num_draws: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Table rows, positions and output indices, int32 [S] each."""
        rows, positions, outputs, _, _ = self._draws[:, :num_draws].unbind()
        return rows, positions, outputs

    def masks(self, num_draws: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks [S, words], and the index of each one's held state, int64 [S]; padding has any
        index."""
        masks, held = self._draws[3:, :num_draws].long().unbind()
        return self._masks[masks], held

    def close(self) -> None:
        """Lets go of the mask table. Nothing may be in flight."""
        self._table.close()
        self._table = NO_MASKS

    def _source(self, table: Int32Array) -> torch.Tensor:
        """The mask table. If it is mapped it is page-locked, and the device reads it in place while
        this process runs."""
        if self._table.masks is not table:
            self._table.close()
            self._table = MaskTable(table, is_locked=self._is_gpu and is_mapped(table))
        return self._table.source

    def _copy_masks(self, draw: DrawPositions, table: Int32Array) -> Int32Array:
        """Copies the mask of each position. Returns where it lies, int32 [P]."""
        source = self._source(table)
        at = np.empty(len(draw.rows), np.int32)
        count = 0
        for i in range(int(draw.place.max()) + 1):
            here = draw.place == i
            wanted = draw.rows[here]
            first = int(wanted.min())
            end = int(wanted.max()) + 1
            if end - first <= _MOST_GAPS * len(wanted):
                self._masks[count : count + end - first].copy_(
                    source[i, first:end], non_blocking=True
                )
                at[here] = count + wanted - first
                count += end - first
            else:
                at[here] = np.arange(count, count + len(wanted))
                for row in wanted.tolist():
                    self._masks[count].copy_(source[i, row], non_blocking=True)
                    count += 1
        return at


def held_at(rows: Int32Array, place: Int32Array, num_rows: int) -> Int32Array:
    """Index of each row's state among the held states, by place and row."""
    at: Int32Array = place * num_rows + rows
    return at
