"""Guesses that are made while nothing waits for them: they are compared with what is sampled, and
tell what waiting for them would gain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..drafting.draft_lengths import Choice, choose
from ..drafting.drafter import Drafter
from ..drafting.step_costs import StepCosts
from ..executor import Int32Array
from .guesses import Guesses
from .masks import RowIndices
from .request_table import RequestTable

MOST_WATCHED = 64
"""Rows for which guesses are made on the side in a step; others follow in the next. Of many rows
each gains little."""


class SideGuesses(Guesses):
    def __init__(
        self, drafters: Sequence[Drafter], *, num_rows: int, most: int, vocab_size: int
    ) -> None:
        super().__init__(drafters, num_rows=num_rows, most=most, vocab_size=vocab_size)
        self._next_watched = 0

    def unguessed(self, rows: RowIndices, most: Int32Array) -> RowIndices:
        """The rows for which a guess is to be made now; most [rows of the table]: drafts that each
        may have."""
        unguessed: RowIndices = rows[(self.num_tokens[rows] == 0) & (most[rows] > 0)]
        if unguessed.size > MOST_WATCHED:
            first = int(np.searchsorted(unguessed, self._next_watched))
            unguessed = unguessed.take(range(first, first + MOST_WATCHED), mode="wrap")
            self._next_watched = int(unguessed[-1]) + 1
        return unguessed

    def choose(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        costs: StepCosts,
        total: int,
    ) -> Choice:
        """Guesses for each row, up to most[i], and chooses how many of them to verify; wanted [rows
        of the table]: the drafter that each row asks for."""
        num_drafts = np.zeros(rows.size, np.int32)
        gain = 1.0
        asked = np.flatnonzero(most > 0)
        if asked.size:
            some = rows[asked]
            self.make(table, some, most[asked], wanted[some], range(len(self._drafters)))
            stands = self.stands(some, self.num_tokens[some])
            num_drafts[asked], gain = choose(stands, costs, rows.size, total)
        return Choice(num_drafts, gain)

    def gain(self, table: RequestTable, rows: RowIndices, costs: StepCosts) -> float:
        """Tokens a second with what is guessed for `rows`, over those without drafts."""
        rows = rows[self.num_tokens[rows] > 0]
        if not rows.size:
            return 1.0
        stands = self.stands(rows, self.num_left(table, rows))
        num_decoding = max(int(np.count_nonzero(table.compute_end)), rows.size)
        return choose(stands, costs, num_decoding, num_decoding * self._most).gain
