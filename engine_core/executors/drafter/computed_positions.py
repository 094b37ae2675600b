"""Positions of the request table's rows that a model which drafts has computed, and those that it
computes next.

What it left out stays out: where keys and values are missing, drafts are worse, and verification
sees to the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...executor import BoolArray, Int32Array

CATCH_UP = 16
"""Number of skipped positions of a row after which the draft model computes them: together they
take little longer than one. Blocks are not smaller, so a cached prefix lacks at most the end of its
last block."""
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Positions that the model computes before it drafts: counts[i] of a row from starts[i] on."""

    index: Int32Array
    """[N] which rows of the step."""
    starts: Int32Array
    counts: Int32Array
    is_drafted: BoolArray
    """[N] whether a token is drafted after them."""


class ComputedPositions:
    def __init__(self, num_rows: int) -> None:
        self._num_kept: Int32Array = np.full(num_rows, UNKNOWN, np.int32)
        """Positions of each row, from the first on; where the row has just been taken they count as
        there as far as the served model's are."""

    def seat(self, row: int) -> None:
        """Forgets the positions of the row's last request."""
        self._num_kept[row] = UNKNOWN

    def take(
        self,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        follows: BoolArray | None = None,
    ) -> CatchUp | None:
        """Before the served model computes positions starts[i] … ends[i] − 1 of rows[i], each of
        which holds a known token, and num_drafts[i] tokens are drafted after them. None: nothing
        is to be computed.

        A row that `follows` is somewhere before these positions, as far as it was in the step
        before: it computes the last two in any case, since the last draft of a step is computed by
        none of it."""
        kept = self._num_kept[rows]
        # Positions after `starts` are those of rejected drafts.
        kept = np.where(kept == UNKNOWN, starts, np.minimum(kept, starts))
        is_drafted = num_drafts > 0
        may_lag = np.ones_like(is_drafted)
        if follows is not None:
            may_lag = ~follows
            kept = np.where(follows, ends - 2, kept)
        is_computed = is_drafted
        if (ends - kept >= CATCH_UP)[may_lag].any():
            is_computed = is_drafted | (may_lag & (ends > kept))
        self._num_kept[rows] = np.where(is_computed, ends + np.maximum(num_drafts - 1, 0), kept)
        index = np.flatnonzero(is_computed).astype(np.int32)
        if not index.size:
            return None
        first = kept[index].astype(np.int32)
        return CatchUp(index, first, (ends[index] - first).astype(np.int32), is_drafted[index])
