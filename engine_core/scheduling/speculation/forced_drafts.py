"""Drafts of tokens that a row's grammar forces.

The process that fills the masks of a row reports with them which tokens the grammar forces from
there on: the only ones that the masks of their places allow. They are verified as all drafts are,
so a false report costs time only. Knows nothing about grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from headwater.kernels.cpu.drafts import comparer

from ...drafting.proposer import Proposal
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from ..table.stop_ids import NO_TOKEN


class ForcedDrafts:
    """One run of forced tokens a row."""

    def __init__(self, num_rows: int, max_drafts: int, vocab_size: int) -> None:
        """`max_drafts`: tokens for one row and step at most."""
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        # While a step verifies a whole draft, the row is given that draft again and the tokens
        # after it.
        self._tokens: Int32Array = np.zeros((num_rows, 2 * max_drafts + 1), np.int32)
        self._num_tokens: Int32Array = np.zeros(num_rows, np.int32)
        """Number of forced tokens of the row; 0 once one of them is known to be wrong, or all are
        known."""
        self._from: Int32Array = np.zeros(num_rows, np.int32)
        """Position of the run's first token."""
        self._num_right: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of the run that were sampled so far."""

    def seat(self, request: RequestState) -> None:
        asked = request.speculation
        is_served = request.has_grammar and asked.is_on and not asked.drafter
        most = min(asked.max_tokens or self._max_drafts, self._max_drafts)
        self._most[request.row] = most if is_served else 0
        self._num_tokens[request.row] = 0

    def vacate(self, row: int) -> None:
        self._most[row] = 0
        self._num_tokens[row] = 0

    def note(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Replaces the forced tokens of `rows`: token_ids[i] are expected behind the known tokens
        of rows[i]. What exceeds a row's room is dropped, as is everything from the first id on that
        the vocabulary does not have."""
        longest = self._tokens.shape[1]
        most = np.where(self._most[rows] > 0, longest, 0).tolist()
        runs = [ids[:num] for ids, num in zip(token_ids, most, strict=True)]
        is_given = np.arange(longest) < np.array([len(run) for run in runs])[:, None]
        given = np.full(is_given.shape, NO_TOKEN)
        given[is_given] = list(chain.from_iterable(runs))
        is_token = (given >= 0) & (given < self._vocab_size)
        self._tokens[rows] = np.where(is_token, given, 0)
        self._num_tokens[rows] = np.logical_and.accumulate(is_token, axis=1).sum(axis=1)
        self._from[rows] = table.num_known[rows]
        self._num_right[rows] = 0

    def compare(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> RowIndices:
        """Notes which forced tokens of `rows` were sampled from position first[i] on. Returns the
        rows that had some."""
        is_forced = self._num_tokens[rows] > 0
        forced = rows[is_forced]
        if forced.size:
            ends = np.empty(forced.size, np.int32)
            runs = self._tokens, self._num_tokens, self._from
            of_rows = forced, first[is_forced], table.num_known, table.token_ids
            comparer()(*of_rows, *runs, self._num_right, ends)
            over = forced[ends != 0]
            self._num_tokens[over] = self._num_right[over] = 0
        return forced

    def are_due(self, table: RequestTable, rows: RowIndices) -> BoolArray:
        """Whether rows have tokens to draft; one that a step in flight samples needs no draft."""
        is_planned = table.num_computed[rows] >= table.num_known[rows]
        are_due: BoolArray = self._num_tokens[rows] - self._num_right[rows] > is_planned
        return are_due

    def propose(self, rows: RowIndices, most: Int32Array) -> Proposal:
        """Forced tokens after the known ones of each row, up to most[i]."""
        num_left = self._num_tokens[rows] - self._num_right[rows]
        num_drafts = np.minimum(np.minimum(num_left, most), self._most[rows])
        places = self._num_right[rows, None] + np.arange(self._max_drafts)
        draft_ids = self._tokens[rows[:, None], np.minimum(places, self._tokens.shape[1] - 1)]
        return Proposal(draft_ids, num_drafts, num_drafts)
