"""Statistics of the tokens that the executor drafted by itself, row by row: how often it found any, and how many stood.

The scheduler asks for drafts before it knows whether any will be found, and a step or two before it hears of the last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..executor import BoolArray, Int32Array
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
"""Weight of the first guess, in drafts."""
FIRST_FOUND, FIRST_RIGHT = 0.7, 0.6
"""Share of steps that find a draft, and of drafted tokens that stand, before anything was seen."""


class _Share:
    """A share of tries, for each row and for all."""

    def __init__(self, num_rows: int, first: float) -> None:
        self._good, self._tried = np.zeros(num_rows), np.zeros(num_rows)
        self._all_good, self._all_tried = SHARED_WEIGHT * first, SHARED_WEIGHT

    def reset(self, row: int) -> None:
        self._good[row] = self._tried[row] = 0.0

    def of(self, rows: npt.NDArray[np.integer]) -> Float64Array:
        self._good[rows] *= FADING
        self._tried[rows] *= FADING
        good = self._good[rows] + PRIOR_WEIGHT * self._all_good / self._all_tried
        return np.asarray(good / (self._tried[rows] + PRIOR_WEIGHT))

    def note(self, rows: npt.NDArray[np.integer], good: Int32Array | BoolArray, tried: Int32Array | BoolArray) -> None:
        self._good[rows] = MEMORY * self._good[rows] + good
        self._tried[rows] = MEMORY * self._tried[rows] + tried
        kept = SHARED_MEMORY ** len(rows)
        self._all_good = kept * self._all_good + float(good.sum())
        self._all_tried = kept * self._all_tried + float(tried.sum())


class ExecutorDrafts:
    def __init__(self, num_rows: int) -> None:
        self._found, self._right = _Share(num_rows, FIRST_FOUND), _Share(num_rows, FIRST_RIGHT)

    def reset(self, row: int) -> None:
        """Forgets the row, which is another request's now."""
        self._found.reset(row)
        self._right.reset(row)

    def stands(self, rows: npt.NDArray[np.integer], most: Int32Array, num_columns: int) -> Float64Array:
        """Probability [R, num_columns] that a row's i-th draft is found and stands, 0 from most[i] on."""
        return expected(self._right.of(rows), most, num_columns, self._found.of(rows))

    def note(
        self, rows: npt.NDArray[np.integer], most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Notes that up to most[i] tokens were asked for, num_drafts[i] were drafted, and num_accepted[i] of them
        stand."""
        asked = np.flatnonzero(most)
        if asked.size:
            rows, num_drafts, num_accepted = rows[asked], num_drafts[asked], num_accepted[asked]
            self._found.note(rows, num_drafts > 0, np.ones(asked.size, np.bool_))
            # One token behind those that stand was wrong, unless all of them stand.
            self._right.note(rows, num_accepted, num_accepted + (num_accepted < num_drafts))
