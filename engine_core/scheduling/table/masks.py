"""Rows whose next tokens wait for masks to be drawn, and how long a step waits for them.

Knows rows, output indices and time; knows nothing about requests, or what a mask stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...executor import BoolArray, Int32Array

RowIndices = npt.NDArray[np.intp]
Int64Array = npt.NDArray[np.int64]
PATIENCE_SECONDS = 0.001
"""The time that a step or a draw waits for late masks before it goes without their rows."""
NO_OUTPUT = -1


class HeldRows:
    """Columns with one entry a row of the request table. A held row has logits of one or more
    positions, each of which is drawn under its own mask."""

    def __init__(self, num_rows: int, masks: Int32Array, clock: Callable[[], float]) -> None:
        """masks [positions, rows, words]; `note` is called when some of them are filled."""
        self.masks = masks
        self.has_grammar: BoolArray = np.zeros(num_rows, np.bool_)
        self.num_held: Int32Array = np.zeros(num_rows, np.int32)
        """Positions; until they are drawn the row does not decode."""
        self.tickets: Int64Array = np.zeros(num_rows, np.int64)
        """Number of each seating: masks that an earlier seating requested are ignored."""
        self.first_held: Int32Array = np.zeros(num_rows, np.int32)
        """Output index of the first position that is held."""
        self._held_since: Int64Array = np.zeros(num_rows, np.int64)
        """Serial number of the step that holds the row's logits."""
        self._first_mask: Int32Array = np.full(num_rows, NO_OUTPUT, np.int32)
        """Output index of the first position that has a mask."""
        self._num_masks: Int32Array = np.zeros(num_rows, np.int32)
        self._num_seated = self._num_grammars = self._num_holds = 0
        self._clock = clock
        self._retired_at = -math.inf

    def seat(self, row: int, *, has_grammar: bool) -> None:
        self.has_grammar[row] = has_grammar
        self._num_grammars += has_grammar
        self._num_seated += 1
        self.tickets[row] = self._num_seated
        self._first_mask[row] = NO_OUTPUT

    def vacate(self, row: int) -> None:
        self._num_grammars -= int(self.has_grammar[row])
        self.has_grammar[row] = False
        self.num_held[row] = 0

    def hold(
        self, rows: RowIndices, first_outputs: Int32Array, num_drafts: Int32Array | int
    ) -> None:
        """Holds a position of each row, and one for each draft after it."""
        self._num_holds += 1
        self._held_since[rows] = self._num_holds
        self.num_held[rows] = num_drafts + 1
        self.first_held[rows] = first_outputs

    def drop(self, row: int) -> int:
        """Drops the row's held positions, which are never drawn; returns how many these were."""
        num_held = int(self.num_held[row])
        self.num_held[row] = 0
        return num_held

    def note(
        self,
        rows: RowIndices,
        tickets: Int64Array,
        output_indices: Int32Array,
        num_masks: Int32Array | int = 1,
    ) -> None:
        """The masks of so many outputs from these on are in `masks`."""
        is_current = self.tickets[rows] == tickets
        self._first_mask[rows[is_current]] = output_indices[is_current]
        self._num_masks[rows[is_current]] = np.broadcast_to(num_masks, rows.shape)[is_current]

    def take_drawable(self, most: int) -> tuple[RowIndices, Int32Array, Int32Array]:
        """Takes rows that have all their masks: the rows, the first output that each held, and the
        number of outputs. If they have more than `most` positions together, those that waited
        longest are taken."""
        rows = np.flatnonzero((self.num_held > 0) & self._has_masks())
        if self.num_held[rows].sum() > most:
            oldest_first = rows[np.argsort(self._held_since[rows], kind="stable")]
            rows = np.sort(oldest_first[np.cumsum(self.num_held[oldest_first]) <= most])
        num_held = self.num_held[rows]
        self.num_held[rows] = 0
        return rows, self.first_held[rows], num_held

    @property
    def has_grammars(self) -> bool:
        """Whether any row has a grammar."""
        return self._num_grammars > 0

    @property
    def await_masks(self) -> bool:
        return self.has_grammars and bool(((self.num_held > 0) & ~self._has_masks()).any())

    def note_retired(self) -> None:
        """Notes that the device has given back a step, and may have nothing to do."""
        self._retired_at = self._clock()

    def hold_back(self, *, is_in_flight: bool) -> bool:
        """Whether the next step or draw waits for masks. While the device is busy, and a moment
        longer, rows that wait for theirs may still join it: two of half the rows would take twice
        the time."""
        return self.await_masks and (
            is_in_flight or self._clock() < self._retired_at + PATIENCE_SECONDS
        )

    def _has_masks(self) -> BoolArray:
        has_masks: BoolArray = (self._first_mask == self.first_held) & (
            self._num_masks >= self.num_held
        )
        return has_masks
