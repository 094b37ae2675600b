"""Answers of one namespace: a ring of their tokens, each answer with a separator after it, and its
index."""

from __future__ import annotations

import numpy as np

from headwater.kernels.cpu.suffix_match import KEY_LENS, SEPARATOR, indexer

from ..executor import Int32Array

NUM_FIELDS = 6
"""Number of int64 numbers by which `history_drafter` finds a history."""
TOKENS_PER_BUCKET = 2
LAST_POSITION = np.iinfo(np.int32).max
"""Largest position. Positions grow for ever, and an index keeps 32 bits of them."""


class History:
    """Tokens stand at positions that grow for ever; the last `capacity` of them, a power of two,
    are kept.

    Position 0 is a separator, since 0 means no position in the index.
    """

    __slots__ = ("_addresses", "_heads", "_previous", "_tokens", "end")

    def __init__(self, capacity: int) -> None:
        assert capacity > max(KEY_LENS), capacity
        self._tokens: Int32Array = np.full(capacity, SEPARATOR, np.int32)
        self._previous: Int32Array = np.zeros((len(KEY_LENS), capacity), np.int32)
        self._heads: Int32Array = np.zeros((len(KEY_LENS), capacity // TOKENS_PER_BUCKET), np.int32)
        self._addresses = tuple(
            array.ctypes.data for array in (self._tokens, self._heads, self._previous)
        )
        self.end = 1

    @property
    def capacity(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._previous.nbytes + self._heads.nbytes

    @property
    def fields(self) -> tuple[int, ...]:
        """Numbers of the history for `history_drafter`; they are valid until it learns."""
        return *self._addresses, self.capacity, self._heads.shape[1], self.end

    def learn(self, answer: Int32Array) -> None:
        """Adds an answer, of which the last capacity − 1 tokens are kept."""
        self._append(np.append(answer[1 - self.capacity :], np.int32(SEPARATOR)))

    def grown(self, capacity: int) -> History:
        """A larger history with the same tokens; this one has forgotten none so far."""
        assert self.end <= self.capacity < capacity
        larger = History(capacity)
        larger._append(self._tokens[1 : self.end])
        return larger

    def _append(self, tokens: Int32Array) -> None:
        if self.end + len(tokens) > LAST_POSITION:
            # Positions have 32 bits in the index: a namespace starts an empty history once in 2 ×
            # 10⁹ tokens.
            self._heads[:] = 0
            self.end = 1
            self._tokens[:] = SEPARATOR
        start = self.end
        self.end = self.end + len(tokens)
        mask = self.capacity - 1
        self._tokens[np.arange(start, self.end) & mask] = tokens
        indexer()(self._tokens, self._heads, self._previous, mask, start, self.end)
