"""The requests that hold a row, in columns: what the scheduler advances for all of them at once.

The mirror of the executor's request table. Column arrays have one entry a row; rows that hold
nobody never match.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..executor import BoolArray, Int32Array
from ..kv.prefix_cache import HashChain
from .masks import HeldRows, Rows
from .request_state import NO_ROW, Rank, RequestState

NEVER = np.iinfo(np.int32).max
NO_TOKEN = -1
NUM_STOP_COLUMNS = 8


class RequestTable:
    """Rows are taken by `seat` and given back by `vacate`."""

    needs_result: BoolArray
    """Whether the row's next plan needs the result of the last one, so that it decodes with nothing
    of it in flight."""
    runs_ahead: BoolArray
    """Whether the executor drafts for the row, which is then planned also while it is not known how
    far it came."""
    num_uncertain: Int32Array
    """Steps in flight, or held, that have drafts of the row, so that `num_computed` may come to
    less."""
    awaits_drafts: BoolArray
    """Whether such a step has drafts that its plan names: the executor computes nothing of the row
    behind it."""
    num_known: Int32Array
    """Prompt and outputs retired."""
    num_computed: Int32Array
    """Positions scheduled, steps in flight included. While the result of one is not certain, the
    most that it may come to."""
    compute_end: Int32Array
    """Decoding stops before this position; 0 while a row does not decode."""
    capacity: Int32Array
    """Tokens that the row's blocks hold."""
    credit: npt.NDArray[np.int64]
    """Tokens that may yet be scheduled; those in flight are taken off, as many as they may come
    to."""
    num_drafted: Int32Array
    """Drafted tokens of the row that were verified; see `count_drafts`."""
    num_accepted: Int32Array
    """Drafted tokens that were verified and stand."""
    is_alive: BoolArray
    """Whether what is sampled for the row counts; false after its request finished."""
    min_len: Int32Array
    """Stop ids at positions before this do not stop."""
    many_stop_ids: dict[int, tuple[int, ...]]
    """By row, for the rare request whose stop ids do not fit the columns."""
    hash_due: Int32Array
    """With the KV of this many known tokens the row's next block is full and can be cached."""

    def __init__(
        self,
        config: EngineConfig,
        held: HeldRows,
        needs_result: BoolArray | None,
        runs_ahead: BoolArray | None,
    ) -> None:
        """`needs_result`, `runs_ahead` [rows]: columns of others, who may change them between
        steps. None: false for every row."""
        num_rows = config.num_rows
        max_blocks = -(-config.max_model_len // config.block_size)
        self.block_size = config.block_size
        self.held = held
        self._hashes_blocks = config.enable_prefix_caching
        self.has_speculator = needs_result is not None
        self.needs_result = _flags(num_rows) if needs_result is None else needs_result
        self.runs_ahead = _flags(num_rows) if runs_ahead is None else runs_ahead
        self.requests: list[RequestState | None] = [None] * num_rows
        self.free_rows = list(reversed(range(num_rows)))
        self.keys: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.credit = np.zeros(num_rows, np.int64)
        self.num_prompt = _counts(num_rows)
        self.num_known = _counts(num_rows)
        self.num_computed = _counts(num_rows)
        self.num_uncertain = _counts(num_rows)
        self.awaits_drafts = _flags(num_rows)
        self.num_drafted = _counts(num_rows)
        self.num_accepted = _counts(num_rows)
        self.compute_end = _counts(num_rows)
        self.capacity = _counts(num_rows)
        self.min_len = _counts(num_rows)
        self.max_len = _counts(num_rows)
        self.is_alive = _flags(num_rows)
        self.stop_ids: Int32Array = np.full((NUM_STOP_COLUMNS, num_rows), NO_TOKEN, np.int32)
        self._num_stop_columns = 1
        """Columns of `stop_ids` that any request has needed so far; the others hold no token."""
        self.many_stop_ids = {}
        self.hash_due = np.full(num_rows, NEVER, np.int32)
        # Untouched pages of these two cost nothing.
        self.block_ids: Int32Array = np.zeros((num_rows, max_blocks), np.int32)
        self.token_ids: Int32Array = np.zeros((num_rows, config.max_model_len), np.int32)
        # One index array is several times faster than a pair of them.
        self._flat_blocks, self._first_blocks = _flat(self.block_ids)
        self._flat_ids, self._first_ids = _flat(self.token_ids)
        # From the end of a block to its tokens.
        self._in_block = np.arange(-config.block_size, 0)

    def seat(self, request: RequestState, blocks: list[int]) -> int:
        """Gives a row to a request whose known tokens fit `blocks`; it does not decode yet."""
        row = self.free_rows.pop()
        stop_ids = request.sampling.stop_token_ids
        num_tokens = request.num_tokens
        self.requests[row] = request
        request.row = row
        self.keys[row] = request.key
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_known[row] = num_tokens
        self.capacity[row] = len(blocks) * self.block_size
        self.credit[row] = request.credit
        self.is_alive[row] = True
        self.num_uncertain[row] = 0
        self.awaits_drafts[row] = False
        self.max_len[row] = request.max_len
        self.min_len[row] = min(request.num_prompt_tokens + request.min_tokens, NEVER)
        self.held.seat(row, has_grammar=request.has_grammar)
        self.stop_ids[:, row] = NO_TOKEN
        if len(stop_ids) <= NUM_STOP_COLUMNS:
            self.stop_ids[: len(stop_ids), row] = stop_ids
            self._num_stop_columns = max(self._num_stop_columns, len(stop_ids))
        else:
            self.many_stop_ids[row] = stop_ids
        self.block_ids[row, : len(blocks)] = blocks
        self.token_ids[row, :num_tokens] = request.token_ids
        return row

    def vacate(self, row: int) -> None:
        request = self.requests[row]
        assert request is not None
        self.requests[row] = None
        request.row = NO_ROW
        self.is_alive[row] = False
        self.stop_decoding(row)
        self.held.vacate(row)
        self.hash_due[row] = NEVER
        self.many_stop_ids.pop(row, None)
        self.free_rows.append(row)

    def count_drafts(self, request: RequestState) -> None:
        """Adds to the request what became of its drafts since this was last done."""
        row = request.row
        request.num_draft_tokens += int(self.num_drafted[row])
        request.num_accepted_tokens += int(self.num_accepted[row])
        self.num_drafted[row] = self.num_accepted[row] = 0

    def start_decoding(self, request: RequestState) -> None:
        """All known tokens are scheduled, and with them the sample that follows if the answer has
        room for one."""
        row = request.row
        self.num_computed[row] = request.num_tokens
        if request.num_tokens < request.max_len:
            self.compute_end[row] = request.max_len - 1
            self.credit[row] -= 1
        if self._hashes_blocks:
            # The next block to be hashed is the one behind those that were offered to the cache.
            self.hash_due[request.row] = (request.chain.num_cached + 1) * self.block_size

    def stop_decoding(self, row: int) -> None:
        """Ends the row's decoding; positions that it holds are never drawn."""
        self.compute_end[row] = 0
        self.credit[row] += self.held.drop(row)

    def decodable_rows(self) -> Rows:
        is_decodable = (self.num_computed < self.compute_end) & (self.credit > 0)
        if self.held.has_grammars:
            is_decodable &= self.held.num_held == 0
        if self.has_speculator:
            # A row that needs no result any more may still have drafts in flight.
            waits = (
                self.needs_result
                | self.awaits_drafts
                | ((self.num_uncertain > 0) & ~self.runs_ahead)
            )
            is_decodable &= (self.num_known > self.num_computed) | ~waits
        return is_decodable.nonzero()[0]

    def roll_back(self, rows: Rows, counts: Int32Array, had_drafts: BoolArray) -> None:
        """Takes back counts[i] tokens that a step scheduled for rows[i] and its result did not
        confirm; those that had drafts in it are less uncertain by that step."""
        self.num_uncertain[rows] -= had_drafts
        self.awaits_drafts[rows] &= ~had_drafts
        self.num_computed[rows] -= counts
        self.credit[rows] += counts

    def append_block(self, rows: Rows, blocks: Int32Array) -> Int32Array:
        """Gives each row one more block; returns its index in the row's sequence."""
        capacity = self.capacity[rows]
        idx: Int32Array = capacity // self.block_size
        self._flat_blocks[self._first_blocks[rows] + idx] = blocks
        self.capacity[rows] = capacity + self.block_size
        return idx

    def write_tokens(self, rows: Rows, positions: Int32Array, token_ids: Int32Array) -> None:
        """Writes one token at each row's position."""
        self._flat_ids[self._first_ids[rows] + positions] = token_ids

    def take_full_blocks(self, rows: Rows) -> tuple[list[int], Int32Array]:
        """Blocks that rows have filled, and their tokens [blocks, block size]; the next one is due
        a block later."""
        ends = self.hash_due[rows]
        self.hash_due[rows] = ends + self.block_size
        blocks: list[int] = self._flat_blocks[
            self._first_blocks[rows] + (ends // self.block_size - 1)
        ].tolist()
        return blocks, self._flat_ids[(self._first_ids[rows] + ends)[:, None] + self._in_block]

    def has_spare_blocks(self, rows: Rows) -> BoolArray:
        """Whether rows have blocks behind the one of the last position that was scheduled."""
        has_spare: BoolArray = self.capacity[rows] - self.num_computed[rows] >= self.block_size
        return has_spare

    def take_spare_blocks(self, row: int) -> list[int]:
        """Takes a row's blocks behind the one of the last position that was scheduled."""
        num_kept = -(-int(self.num_computed[row]) // self.block_size)
        blocks: list[int] = self.block_ids[
            row, num_kept : self.capacity[row] // self.block_size
        ].tolist()
        self.capacity[row] = num_kept * self.block_size
        return blocks

    def blocks_of(self, row: int) -> list[int]:
        blocks: list[int] = self.block_ids[row, : self.capacity[row] // self.block_size].tolist()
        return blocks

    def known_ids(self, row: int) -> Int32Array:
        return self.token_ids[row, : self.num_known[row]]

    @property
    def num_wasted_slots(self) -> int:
        """KV slots of rows' blocks behind their last known tokens."""
        return int(np.dot(self.capacity - self.num_known, self.is_alive))

    def chains_of(self, rows: Rows) -> list[HashChain]:
        """Hash chains of the requests that hold these rows."""
        return [
            request.chain for row in rows.tolist() if (request := self.requests[row]) is not None
        ]

    def rank_of(self, row: int) -> Rank:
        request = self.requests[row]
        assert request is not None
        return request.rank

    def are_stops(self, rows: Rows, positions: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Whether each row's token at that position ends its answer."""
        hits: BoolArray = self.stop_ids[0][rows] == token_ids
        for column in self.stop_ids[1 : self._num_stop_columns]:
            hits |= column[rows] == token_ids
        for row, stop_ids in self.many_stop_ids.items():
            hits |= (rows == row) & np.isin(token_ids, stop_ids)
        # Few steps have any.
        return hits & (positions >= self.min_len[rows]) if np.count_nonzero(hits) else hits


def _flat(table: Int32Array) -> tuple[Int32Array, Rows]:
    """The table [rows, columns] in one dimension, and where each row begins in it."""
    num_rows, num_columns = table.shape
    return table.reshape(-1), np.arange(num_rows) * num_columns


def _counts(num_rows: int) -> Int32Array:
    return np.zeros(num_rows, np.int32)


def _flags(num_rows: int) -> BoolArray:
    return np.zeros(num_rows, np.bool_)
