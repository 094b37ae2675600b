"""Drafts the tokens that followed an earlier occurrence of a row's last tokens in the same row, in
its prompt or its answer.

Also called prompt look-up: edits, quotations and calls that repeat earlier text are mostly copies.
"""

from __future__ import annotations

import numpy as np

from headwater.kernels.cpu.suffix_match import KEY_LENS, row_drafter

from ..executor import Int32Array
from .proposer import Proposal

MIN_BUCKETS = 1 << 8
MAX_BUCKETS = 1 << 13
"""Least and largest number of a key's buckets in a row's index: few enough to be cleared when a
request takes the row."""


class NGramProposer:
    """Drafts the tokens that followed an earlier occurrence of the last tokens in the same request.
    Each row has an index of its known tokens, which is dropped with the row."""

    name = "ngram"

    def __init__(self, num_rows: int, max_len: int, max_drafts: int) -> None:
        """max_len: largest number of known tokens of a row; max_drafts: largest number of drafted
        tokens of a row and step."""
        num_buckets = min(max(1 << (max_len // 4).bit_length(), MIN_BUCKETS), MAX_BUCKETS)
        # Untouched pages of these two arrays take no memory.
        self._heads: Int32Array = np.zeros((num_rows, len(KEY_LENS), num_buckets), np.int32)
        self._previous: Int32Array = np.zeros((num_rows, len(KEY_LENS), max_len), np.int32)
        self._num_indexed: Int32Array = np.zeros(num_rows, np.int32)
        self._most_indexed: Int32Array = np.zeros(num_rows, np.int32)
        """Largest number of tokens of any request that the row has had."""
        self._max_drafts = max_drafts
        self._draft = row_drafter()
        # The first call of machine code takes milliseconds, which no step has.
        none = np.zeros(0, np.int32)
        self.propose(none, np.zeros((1, 1), np.int32), none, none)

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        """Resets the row, which gets other tokens from now on."""
        self._forget(row)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self._forget(row)

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        """See `Proposer`. The first call after `seat` indexes the whole prompt, about 10 ns a
        token."""
        # Machine code checks no bounds.
        assert token_ids.shape[1] <= self._previous.shape[2], token_ids.shape
        drafts = np.zeros((len(rows), self._max_drafts), np.int32)
        num_drafts, match_lens = np.zeros((2, len(rows)), np.int32)
        index = self._heads, self._previous, self._num_indexed
        self._draft(token_ids, *index, rows, num_known, most, drafts, num_drafts, match_lens)
        return Proposal(drafts, num_drafts, match_lens)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that requests have touched so far; a row's memory is reused by its next
        request."""
        most = np.maximum(self._most_indexed, self._num_indexed)
        num_bytes = 4 * len(KEY_LENS) * int(most.sum()) + self._heads[0].nbytes * int(
            (most > 0).sum()
        )
        return int(num_bytes + self._num_indexed.nbytes + self._most_indexed.nbytes)

    def _forget(self, row: int) -> None:
        if self._num_indexed[row]:
            self._most_indexed[row] = max(self._most_indexed[row], self._num_indexed[row])
            self._num_indexed[row] = 0
            self._heads[row] = 0
