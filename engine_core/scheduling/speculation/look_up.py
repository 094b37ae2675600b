"""Drafts that are looked up in text, and how many of their tokens turned out right.

A draft counts whether or not a step verifies it: one that is made on the side tells what waiting
for such drafts would gain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from headwater.kernels.cpu.drafts import WRONG, better_taker, comparer, length_chooser, standing

from ...drafting.acceptance import Acceptance
from ...drafting.draft_lengths import Choice, Float64Array, choose, expected
from ...drafting.proposer import Proposer
from ...drafting.step_costs import StepCosts
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_table import RequestTable

ANY = -1
"""Any proposer: the one with the highest expected gain is used."""
UNKNOWN = -1
"""Placeholder for a number of bytes that is counted later: many requests that leave at once would
count it many times."""


MOST_WATCHED = 64
"""Rows for which drafts are looked up on the side in a step; others follow in the next. Of many
rows each gains little."""


class LookUp:
    """The best drafts of several proposers. Each row has one draft at most, which is over with its
    last token or the first that is wrong."""

    def __init__(
        self, proposers: Sequence[Proposer], *, num_rows: int, most: int, vocab_size: int
    ) -> None:
        """`most`: tokens of a draft."""
        # Compiled here, so that no step waits for the compiler.
        for compiled in (better_taker, comparer, length_chooser, standing):
            compiled()
        self._proposers = tuple(proposers)
        self._vocab_size = vocab_size
        self._most = most
        self._acceptance = Acceptance(num_rows)
        self._num_bytes = UNKNOWN
        self._next_watched = 0
        """Row of the table from which on drafts are looked up next on the side."""
        self.token_ids: Int32Array = np.zeros((num_rows, most), np.int32)
        self.num_tokens: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the row's last draft; 0 once it is over."""
        self.drafted_by: Int32Array = np.zeros(num_rows, np.int32)
        """Index of the proposer of each row's draft."""
        self._from: Int32Array = np.zeros(num_rows, np.int32)
        """Position of the first drafted token."""
        self._num_right: Int32Array = np.zeros(num_rows, np.int32)
        """Drafted tokens that were sampled so far."""
        self._match_lens: Int32Array = np.zeros(num_rows, np.int32)

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        """Begins to follow a request that has taken a row."""
        self._acceptance.reset(row)
        for proposer in self._proposers:
            proposer.seat(row, namespace, tenant, num_prompt)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        # Right drafts are counted before the row is another request's.
        self.end(np.array([row]))
        for proposer in self._proposers:
            proposer.vacate(row, token_ids)
        self._num_bytes = UNKNOWN

    @property
    def num_bytes(self) -> int:
        """Memory that proposers hold, as of when a request last left its row."""
        if self._num_bytes == UNKNOWN:
            self._num_bytes = sum(proposer.num_bytes for proposer in self._proposers)
        return self._num_bytes

    def propose(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        proposers: Collection[int],
    ) -> None:
        """Replaces each row's draft by the best one of these proposers, or of the proposer in
        `wanted`."""
        self.end(rows)
        self._from[rows] = table.num_known[rows]
        self._match_lens[rows] = 0
        self.improve(table, rows, most, wanted, proposers)

    def undrafted(self, rows: RowIndices, most: Int32Array) -> RowIndices:
        """Rows for which a draft is to be looked up now; most [rows of the table]: drafts that each
        may have."""
        undrafted: RowIndices = rows[(self.num_tokens[rows] == 0) & (most[rows] > 0)]
        if undrafted.size > MOST_WATCHED:
            first = int(np.searchsorted(undrafted, self._next_watched))
            undrafted = undrafted.take(range(first, first + MOST_WATCHED), mode="wrap")
            self._next_watched = int(undrafted[-1]) + 1
        return undrafted

    def improve(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        proposers: Collection[int],
    ) -> None:
        """Replaces the drafts of rows for which one of these proposers has a higher expected
        gain."""
        is_any = wanted == ANY
        for i in proposers:
            asked = is_any | (wanted == i)
            some, few = (rows, most) if asked.all() else (rows[asked], most[asked])
            if not some.size:
                continue
            found = self._proposers[i].propose(
                some.astype(np.int32), table.token_ids, table.num_known[some], few
            )
            drafts = self.token_ids, self.num_tokens, self._match_lens
            better_taker()(
                some,
                *found,
                few,
                self._vocab_size,
                self._acceptance.by_match,
                *drafts,
                i,
                self.drafted_by,
            )

    def compare(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        """Notes which drafted tokens were sampled, those of `rows` from position first[i] on."""
        ends = np.empty(rows.size, np.int32)
        drafts = self.token_ids, self.num_tokens, self._from
        comparer()(rows, first, table.num_known, table.token_ids, *drafts, self._num_right, ends)
        over = np.flatnonzero(ends)
        if over.size:
            self.end(rows[over], ends[over] == WRONG)

    def note_drafted(
        self, rows: RowIndices, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Tokens that the executor drafted were right or not, as if they had been looked up."""
        drafted = np.flatnonzero(num_drafts)
        is_over = num_accepted[drafted] < num_drafts[drafted]
        self._acceptance.note_rows(rows[drafted], num_accepted[drafted], is_over)

    def num_left(self, table: RequestTable, rows: RowIndices) -> Int32Array:
        """Number of drafted tokens of each row after its known ones."""
        num_left: Int32Array = self.num_tokens[rows] - (table.num_known[rows] - self._from[rows])
        return num_left

    def stands(self, rows: RowIndices, num_offered: Int32Array) -> Float64Array:
        """[R, most] the probability that a row's i-th drafted token is right, as are all before
        it."""
        return expected(self._acceptance.of(rows, self._match_lens[rows]), num_offered, self._most)

    def choose(
        self,
        table: RequestTable,
        rows: RowIndices,
        most: Int32Array,
        wanted: Int32Array,
        costs: StepCosts,
        total: int,
    ) -> Choice:
        """Looks drafts up for each row, up to most[i], and chooses how many of them to verify;
        wanted [rows of the table]: the proposer that each row asks for."""
        num_drafts = np.zeros(rows.size, np.int32)
        gain = 1.0
        asked = np.flatnonzero(most > 0)
        if asked.size:
            some = rows[asked]
            self.propose(table, some, most[asked], wanted[some], range(len(self._proposers)))
            stands = self.stands(some, self.num_tokens[some])
            num_drafts[asked], gain = choose(stands, costs, rows.size, total)
        return Choice(num_drafts, gain)

    def gain(self, table: RequestTable, rows: RowIndices, costs: StepCosts) -> float:
        """Tokens a second with the drafts of `rows`, over those without drafts."""
        rows = rows[self.num_tokens[rows] > 0]
        if not rows.size:
            return 1.0
        stands = self.stands(rows, self.num_left(table, rows))
        num_decoding = max(int(np.count_nonzero(table.compute_end)), rows.size)
        return choose(stands, costs, num_decoding, num_decoding * self._most).gain

    def end(self, rows: RowIndices, is_wrong: BoolArray | None = None) -> None:
        """Notes that drafts of rows are over; None: none of them was wrong."""
        if is_wrong is None:
            is_wrong = np.zeros(rows.size, np.bool_)
        is_noted = is_wrong | (self._num_right[rows] > 0)
        noted = rows[is_noted]
        if noted.size:
            self._acceptance.note(
                noted, self._match_lens[noted], self._num_right[noted], is_wrong[is_noted]
            )
        self.num_tokens[rows] = self._num_right[rows] = 0
