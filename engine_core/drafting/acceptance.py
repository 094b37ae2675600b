"""Estimates the share of a row's drafted tokens that turn out right, from the results of earlier
drafts.

A draft counts whether or not a step verified it: tokens that are sampled without it show as well
whether it was right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..executor import Int32Array

Float64Array = npt.NDArray[np.float64]
MEMORY = 0.9
"""Weight of a draft's tokens when the next draft ends."""
PRIOR_WEIGHT = 2.0
"""Weight of the knowledge of other rows for a row, in tokens."""
LONGEST_MATCH = 16
"""Length from which all matches count alike."""
FIRST_ESTIMATE = 0.2, 0.85
"""Acceptance after matches of one token and of `LONGEST_MATCH`, before anything was seen; linear
between them."""
SHARED_MEMORY = 0.998
"""Like `MEMORY`, for the averages over all rows."""
SHARED_WEIGHT = 32.0
"""Weight of the first estimate, in tokens."""


class Acceptance:
    """Acceptance by row; values that all rows share are by the length of the match."""

    def __init__(self, num_rows: int) -> None:
        self._right = np.zeros(num_rows)
        self._tried = np.zeros(num_rows)
        estimate = np.linspace(*FIRST_ESTIMATE, LONGEST_MATCH)
        self._all_right = SHARED_WEIGHT * estimate
        self._all_tried = np.full(LONGEST_MATCH, SHARED_WEIGHT)

    def reset(self, row: int) -> None:
        self._right[row] = self._tried[row] = 0.0

    def of(self, rows: npt.NDArray[np.integer], match_lens: Int32Array) -> Float64Array:
        """The probability that a row's next draft is right, if it continues a match of so many
        tokens."""
        kind = _kind(match_lens)
        prior = self._all_right[kind] / self._all_tried[kind]
        right = self._right[rows] + PRIOR_WEIGHT * prior
        return np.asarray(right / (self._tried[rows] + PRIOR_WEIGHT))

    @property
    def by_match(self) -> Float64Array:
        """Acceptance [LONGEST_MATCH] of any row's draft, after matches of 1, 2 … tokens."""
        chances: Float64Array = self._all_right / self._all_tried
        return chances

    def note_rows(
        self, rows: npt.NDArray[np.integer], num_right: Int32Array, is_over: npt.NDArray[np.bool_]
    ) -> None:
        """Notes drafts as `note` does, where the length of the match is not known."""
        self._right[rows] = MEMORY * self._right[rows] + num_right
        self._tried[rows] = MEMORY * self._tried[rows] + num_right + is_over

    def note(
        self,
        rows: npt.NDArray[np.integer],
        match_lens: Int32Array,
        num_right: Int32Array,
        is_over: npt.NDArray[np.bool_],
    ) -> None:
        """Notes that `num_right` leading tokens of each row's draft were accepted; where `is_over`,
        the next one was rejected."""
        self.note_rows(rows, num_right, is_over)
        tried = num_right + is_over
        kind = _kind(match_lens)
        kept = SHARED_MEMORY ** np.bincount(kind, minlength=LONGEST_MATCH)
        self._all_right *= kept
        self._all_tried *= kept
        self._all_right += np.bincount(kind, num_right, LONGEST_MATCH)
        self._all_tried += np.bincount(kind, tried, LONGEST_MATCH)


def _kind(match_lens: Int32Array) -> npt.NDArray[np.integer]:
    return np.minimum(np.maximum(match_lens, 1), LONGEST_MATCH) - 1
