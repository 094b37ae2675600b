"""Statistics of the tokens that the executor drafted by itself, row by row: how often it found any,
and how many were accepted.

The scheduler requests drafts before it knows whether any will be found, one or two steps before the
result of its last request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.kernels.cpu.drafts import share_fader, share_noter

from ..executor import Int32Array
from .draft_lengths import expected

Float64Array = npt.NDArray[np.float64]
MEMORY = 0.9
"""Weight of a step when the next one is known."""
FADING = 0.99
"""Weight, at each step, of a row's statistics: a row that got no drafts for long is tried again."""
PRIOR_WEIGHT = 2.0
"""Weight of all rows' statistics for a row, in drafts."""
SHARED_MEMORY = 0.998
SHARED_WEIGHT = 32.0
"""Weight of the first estimate, in drafts."""
FIRST_FOUND = 0.7
FIRST_RIGHT = 0.6
"""Prior share of steps that find a draft, and prior acceptance of drafted tokens."""


class DeviceDrafts:
    def __init__(self, num_rows: int) -> None:
        self._shares = np.zeros((4, num_rows))
        """Counts of each row, by column: drafts found, drafts requested, tokens accepted, tokens
        compared."""
        first = SHARED_WEIGHT * np.array([FIRST_FOUND, 1.0, FIRST_RIGHT, 1.0])
        self._shared: Float64Array = first
        """Counts of all rows together, by the same columns."""

    def reset(self, row: int) -> None:
        """Forgets the row, which is another request's now."""
        self._shares[:, row] = 0.0

    def stands(
        self, rows: npt.NDArray[np.int64], most: Int32Array, num_columns: int
    ) -> Float64Array:
        """Probability [R, num_columns] that a row's i-th draft is found and accepted, 0 from
        most[i] on."""
        found, right = np.empty((2, rows.size))
        share_fader()(rows, FADING, PRIOR_WEIGHT, self._shares, self._shared, found, right)
        return expected(right, most, num_columns, found)

    def note(
        self,
        rows: npt.NDArray[np.int64],
        most: Int32Array,
        num_drafts: Int32Array,
        num_accepted: Int32Array,
    ) -> None:
        """Counts drafts of rows: most[i] were allowed, num_drafts[i] were found, and
        num_accepted[i] of these were accepted."""
        counts = (np.ascontiguousarray(each, np.int32) for each in (most, num_drafts, num_accepted))
        share_noter()(rows, *counts, MEMORY, SHARED_MEMORY, self._shares, self._shared)
