"""Tokens that end the answer of each row of the request table."""

from __future__ import annotations

import numpy as np

from ...executor import BoolArray, Int32Array
from .masks import RowIndices
from .request_state import RequestState

NO_TOKEN = -1
NUM_COLUMNS = 8
NEVER = np.iinfo(np.int32).max


class StopIds:
    def __init__(self, num_rows: int) -> None:
        self._columns: Int32Array = np.full((NUM_COLUMNS, num_rows), NO_TOKEN, np.int32)
        self._num_columns = 1
        """Columns that any request has needed so far; the others hold no token."""
        self._many: dict[int, tuple[int, ...]] = {}
        """Keyed by row, for the rare request whose stop ids do not fit the columns."""
        self._min_len: Int32Array = np.zeros(num_rows, np.int32)
        """Stop ids at positions before this do not stop."""

    def seat(self, request: RequestState) -> None:
        row = request.row
        stop_ids = request.sampling.stop_token_ids
        self._min_len[row] = min(request.num_prompt_tokens + request.min_tokens, NEVER)
        self._columns[:, row] = NO_TOKEN
        if len(stop_ids) <= NUM_COLUMNS:
            self._columns[: len(stop_ids), row] = stop_ids
            self._num_columns = max(self._num_columns, len(stop_ids))
        else:
            self._many[row] = stop_ids

    def vacate(self, row: int) -> None:
        self._many.pop(row, None)

    def are_stops(
        self, rows: RowIndices, positions: Int32Array, token_ids: Int32Array
    ) -> BoolArray:
        """Whether each row's token at that position is a stop token."""
        hits: BoolArray = self._columns[0][rows] == token_ids
        for column in self._columns[1 : self._num_columns]:
            hits |= column[rows] == token_ids
        for row, stop_ids in self._many.items():
            hits |= (rows == row) & np.isin(token_ids, stop_ids)
        # Few steps have any.
        return hits & (positions >= self._min_len[rows]) if np.count_nonzero(hits) else hits
