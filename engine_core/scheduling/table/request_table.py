"""The requests that hold a row, in columns: what the scheduler advances for all of them at once.

The mirror of the executor's request table. Column arrays have one entry a row; rows without
a request never match. Knows nothing about blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array
from ...kv.prefix_cache import HashChain
from .masks import HeldRows, RowIndices
from .request_state import NO_ROW, Rank, RequestState
from .row_drafts import RowDrafts
from .stop_ids import StopIds


class RequestTable:
    """Rows are taken by `seat` and given back by `vacate`."""

    num_known: Int32Array
    """Prompt and outputs retired."""
    num_computed: Int32Array
    """Positions scheduled, steps in flight included. While the result of one is not certain, the
    most that it may come to."""
    compute_end: Int32Array
    """Decoding stops before this position; 0 while a row does not decode."""
    credit: npt.NDArray[np.int64]
    """Tokens that may yet be scheduled; those in flight are taken off, as many as they may come
    to."""
    is_alive: BoolArray
    """Whether what is sampled for the row counts; false after its request finished."""

    def __init__(self, config: EngineConfig, held: HeldRows, drafts: RowDrafts) -> None:
        num_rows = config.num_rows
        self.held = held
        self.drafts = drafts
        self.stops = StopIds(num_rows)
        self.requests: list[RequestState | None] = [None] * num_rows
        self.free_rows = list(reversed(range(num_rows)))
        self.keys: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.credit = np.zeros(num_rows, np.int64)
        self.num_prompt: Int32Array = np.zeros(num_rows, np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.compute_end = np.zeros(num_rows, np.int32)
        self.max_len: Int32Array = np.zeros(num_rows, np.int32)
        self.is_alive = np.zeros(num_rows, np.bool_)
        # Untouched pages cost nothing.
        self.token_ids: Int32Array = np.zeros((num_rows, config.max_model_len), np.int32)
        self._first_ids = np.arange(num_rows) * config.max_model_len
        """Place of each row's first token in `token_ids` as one dimension."""

    def seat(self, request: RequestState) -> None:
        """Gives a row to a request; it does not decode yet."""
        row = self.free_rows.pop()
        num_tokens = request.num_tokens
        self.requests[row] = request
        request.row = row
        self.keys[row] = request.key
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_known[row] = num_tokens
        self.credit[row] = request.credit
        self.is_alive[row] = True
        self.max_len[row] = request.max_len
        self.drafts.seat(row)
        self.held.seat(row, has_grammar=request.has_grammar)
        self.stops.seat(request)
        self.token_ids[row, :num_tokens] = request.token_ids

    def vacate(self, row: int) -> None:
        request = self.requests[row]
        assert request is not None
        self.requests[row] = None
        request.row = NO_ROW
        self.is_alive[row] = False
        self.stop_decoding(row)
        self.held.vacate(row)
        self.stops.vacate(row)
        self.free_rows.append(row)

    def start_decoding(self, request: RequestState) -> None:
        """Turns a request's row into a decode row: all known tokens are scheduled, and with them
        the sample that follows if the answer has room for one."""
        row = request.row
        self.num_computed[row] = request.num_tokens
        if request.num_tokens < request.max_len:
            self.compute_end[row] = request.max_len - 1
            self.credit[row] -= 1

    def stop_decoding(self, row: int) -> None:
        """Ends the row's decoding; positions that it holds are not drawn."""
        self.compute_end[row] = 0
        self.credit[row] += self.held.drop(row)

    def decodable_rows(self) -> RowIndices:
        is_decodable = (self.num_computed < self.compute_end) & (self.credit > 0)
        if self.held.has_grammars:
            is_decodable &= self.held.num_held == 0
        if self.drafts.is_on:
            is_decodable &= (self.num_known > self.num_computed) | ~self.drafts.have_to_wait()
        return is_decodable.nonzero()[0]

    def roll_back(self, rows: RowIndices, counts: Int32Array, had_drafts: BoolArray) -> None:
        """Takes back counts[i] tokens that a step scheduled for rows[i] and its result did not
        confirm."""
        self.drafts.settle(rows, had_drafts)
        self.num_computed[rows] -= counts
        self.credit[rows] += counts

    def write_tokens(self, rows: RowIndices, positions: Int32Array, token_ids: Int32Array) -> None:
        """Writes one token at each row's position."""
        # One index array is several times faster than a pair of them.
        self.token_ids.reshape(-1)[self._first_ids[rows] + positions] = token_ids

    def tokens_before(self, rows: RowIndices, ends: Int32Array, count: int) -> Int32Array:
        """The last `count` tokens of each row before position ends[i]: [rows, count]."""
        first = self._first_ids[rows] + ends - count
        tokens: Int32Array = self.token_ids.reshape(-1)[first[:, None] + np.arange(count)]
        return tokens

    def known_ids(self, row: int) -> Int32Array:
        return self.token_ids[row, : self.num_known[row]]

    def chains_of(self, rows: RowIndices) -> list[HashChain]:
        """Hash chains of the requests that hold these rows."""
        return [
            request.chain for row in rows.tolist() if (request := self.requests[row]) is not None
        ]

    def rank_of(self, row: int) -> Rank:
        request = self.requests[row]
        assert request is not None
        return request.rank
