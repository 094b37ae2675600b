"""Guesses of drafters for the rows of the request table, and how many of them turned out right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from headwater.kernels.cpu.guesses import WRONG, better_taker, comparer, length_chooser, standing

from ..drafting.acceptance import Acceptance
from ..drafting.draft_lengths import Float64Array, expected
from ..drafting.drafter import Drafter
from ..executor import BoolArray, Int32Array
from .masks import RowIndices
from .request_table import RequestTable

ANY = -1
"""Whichever drafter promises most."""
UNKNOWN = -1
"""In place of a number of bytes, which many requests that leave at once would count many times."""


class Guesses:
    """Each row has one guess at most, which is over with its last token or the first that is
    wrong."""

    def __init__(
        self, drafters: Sequence[Drafter], *, num_rows: int, most: int, vocab_size: int
    ) -> None:
        """`most`: tokens of a guess."""
        # Compiled here, so that no step waits for it.
        for compiled in (better_taker, comparer, length_chooser, standing):
            compiled()
        self._drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._most = most
        self._acceptance = Acceptance(num_rows)
        self._num_bytes = UNKNOWN
        self.token_ids: Int32Array = np.zeros((num_rows, most), np.int32)
        self.num_tokens: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the row's last guess; 0 once it is over."""
        self.guessed_by: Int32Array = np.zeros(num_rows, np.int32)
        """Number of the drafter that made it."""
        self._from: Int32Array = np.zeros(num_rows, np.int32)
        """Position of the first token that was guessed."""
        self._num_right: Int32Array = np.zeros(num_rows, np.int32)
        """Guessed tokens that were sampled so far."""
        self._match_lens: Int32Array = np.zeros(num_rows, np.int32)

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        """A request has taken the row."""
        self._acceptance.reset(row)
        for drafter in self._drafters:
            drafter.seat(row, namespace, tenant, num_prompt)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        # Right guesses are counted before the row is another request's.
        self.end(np.array([row]))
        for drafter in self._drafters:
            drafter.vacate(row, token_ids)
        self._num_bytes = UNKNOWN

    @property
    def num_bytes(self) -> int:
        """Memory that drafters hold, as of when a request last left its row."""
        if self._num_bytes == UNKNOWN:
            self._num_bytes = sum(drafter.num_bytes for drafter in self._drafters)
        return self._num_bytes

    def make(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        drafters: Collection[int],
    ) -> None:
        """Replaces guesses by those after all known tokens that promise most, of these drafters or
        the one that a row wants."""
        self.end(rows)
        self._from[rows] = table.num_known[rows]
        self._match_lens[rows] = 0
        self.improve(table, rows, most, wanted, drafters)

    def improve(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        drafters: Collection[int],
    ) -> None:
        """Takes guesses of these drafters as well where they promise more than those that were just
        made."""
        is_any = wanted == ANY
        for i in drafters:
            asked = is_any | (wanted == i)
            some, few = (rows, most) if asked.all() else (rows[asked], most[asked])
            if not some.size:
                continue
            found = self._drafters[i].propose(
                some.astype(np.int32), table.token_ids, table.num_known[some], few
            )
            guesses = self.token_ids, self.num_tokens, self._match_lens
            better_taker()(
                some,
                *found,
                few,
                self._vocab_size,
                self._acceptance.by_match,
                *guesses,
                i,
                self.guessed_by,
            )

    def compare(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        """Notes which guessed tokens were sampled, those of `rows` from position first[i] on."""
        ends = np.empty(rows.size, np.int32)
        guesses = self.token_ids, self.num_tokens, self._from
        comparer()(rows, first, table.num_known, table.token_ids, *guesses, self._num_right, ends)
        over = np.flatnonzero(ends)
        if over.size:
            self.end(rows[over], ends[over] == WRONG)

    def note_drafted(
        self, rows: RowIndices, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Tokens that the executor drafted were right or not, as if they had been guessed here."""
        drafted = np.flatnonzero(num_drafts)
        is_over = num_accepted[drafted] < num_drafts[drafted]
        self._acceptance.note_rows(rows[drafted], num_accepted[drafted], is_over)

    def num_left(self, table: RequestTable, rows: RowIndices) -> Int32Array:
        """Guessed tokens of rows that lie behind the known ones."""
        num_left: Int32Array = self.num_tokens[rows] - (table.num_known[rows] - self._from[rows])
        return num_left

    def stands(self, rows: RowIndices, num_offered: Int32Array) -> Float64Array:
        """[R, most] the probability that a row's i-th guessed token is right, as are all before
        it."""
        return expected(self._acceptance.of(rows, self._match_lens[rows]), num_offered, self._most)

    def end(self, rows: RowIndices, is_wrong: BoolArray | None = None) -> None:
        """Guesses of rows are over; None: none of them was wrong."""
        if is_wrong is None:
            is_wrong = np.zeros(rows.size, np.bool_)
        is_noted = is_wrong | (self._num_right[rows] > 0)
        noted = rows[is_noted]
        if noted.size:
            self._acceptance.note(
                noted, self._match_lens[noted], self._num_right[noted], is_wrong[is_noted]
            )
        self.num_tokens[rows] = self._num_right[rows] = 0
