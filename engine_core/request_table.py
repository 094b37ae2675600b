"""The requests that hold a row, in columns: what the scheduler advances for all of them at once.

The mirror of the executor's request table. Column arrays have one entry a row; rows that hold nobody never match.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.request_state import NO_ROW, RequestState

Int64Array = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int32).max
NO_TOKEN = -1
NO_ROWS: npt.NDArray[np.intp] = np.empty(0, np.intp)
NUM_STOP_COLUMNS = 8


class RequestTable:
    """Rows are taken by `seat` and given back by `vacate`."""

    def __init__(self, config: EngineConfig) -> None:
        num_rows = config.max_num_seqs
        max_blocks = -(-config.max_model_len // config.block_size)
        self.block_size = config.block_size
        self._hashes_blocks = config.enable_prefix_caching
        self.requests: list[RequestState | None] = [None] * num_rows
        self.free_rows = list(reversed(range(num_rows)))
        self.keys: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_prompt: Int32Array = np.zeros(num_rows, np.int32)
        self.num_known: Int32Array = np.zeros(num_rows, np.int32)
        """Prompt and outputs retired."""
        self.num_computed: Int32Array = np.zeros(num_rows, np.int32)
        """Positions scheduled, steps in flight included."""
        self.compute_end: Int32Array = np.zeros(num_rows, np.int32)
        """Decoding stops before this position; 0 while a row does not decode."""
        self.capacity: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens that the row's blocks hold."""
        self.credit: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """Tokens that may yet be scheduled; those in flight are taken off."""
        self.is_alive: BoolArray = np.zeros(num_rows, np.bool_)
        """Whether what is sampled for the row counts; false after its request finished."""
        self.max_len: Int32Array = np.zeros(num_rows, np.int32)
        self.min_len: Int32Array = np.zeros(num_rows, np.int32)
        """Stop ids at positions before this do not stop."""
        self.stop_ids: Int32Array = np.full((num_rows, NUM_STOP_COLUMNS), NO_TOKEN, np.int32)
        self.many_stop_ids: dict[int, tuple[int, ...]] = {}
        """By row, for the rare request whose stop ids do not fit the columns."""
        self.is_plain: BoolArray = np.zeros(num_rows, np.bool_)
        """Whether an executor may go on decoding the row by itself."""
        self.has_grammar: BoolArray = np.zeros(num_rows, np.bool_)
        self.is_held: BoolArray = np.zeros(num_rows, np.bool_)
        """Whether the row's next token waits for a mask to be drawn; until then it does not decode."""
        self.tickets: Int64Array = np.zeros(num_rows, np.int64)
        """Names each seating: masks that were asked for by another one do not count."""
        self.mask_index: Int32Array = np.full(num_rows, NO_TOKEN, np.int32)
        """Output index of the token that the row's mask is for."""
        self.hash_due: Int32Array = np.full(num_rows, NEVER, np.int32)
        """With the KV of this many known tokens the row's next block is full and can be cached."""
        self._num_seated = self.num_grammars = 0
        # Untouched pages of these two cost nothing.
        self.block_ids: Int32Array = np.zeros((num_rows, max_blocks), np.int32)
        self.token_ids: Int32Array = np.zeros((num_rows, config.max_model_len), np.int32)

    def seat(self, request: RequestState, blocks: list[int]) -> int:
        """Gives a row to a request whose known tokens fit `blocks`; it does not decode yet."""
        row = self.free_rows.pop()
        stop_ids, num_tokens = request.sampling.stop_token_ids, request.num_tokens
        self.requests[row], request.row = request, row
        self.keys[row] = request.key
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_known[row] = num_tokens
        self.capacity[row] = len(blocks) * self.block_size
        self.credit[row] = request.credit
        self.is_alive[row] = True
        self.max_len[row] = request.max_len
        self.min_len[row] = min(request.num_prompt_tokens + request.min_tokens, NEVER)
        self.is_plain[row] = request.sampling.is_plain and not request.has_grammar
        self.has_grammar[row] = request.has_grammar
        self.num_grammars += request.has_grammar
        self._num_seated += 1
        self.tickets[row], self.mask_index[row] = self._num_seated, NO_TOKEN
        self.stop_ids[row] = NO_TOKEN
        if len(stop_ids) <= NUM_STOP_COLUMNS:
            self.stop_ids[row, : len(stop_ids)] = stop_ids
        else:
            self.many_stop_ids[row] = stop_ids
        self.block_ids[row, : len(blocks)] = blocks
        self.token_ids[row, :num_tokens] = request.token_ids
        return row

    def vacate(self, row: int) -> None:
        request = self.requests[row]
        assert request is not None
        self.requests[row], request.row = None, NO_ROW
        self.num_grammars -= request.has_grammar
        self.is_alive[row] = self.has_grammar[row] = False
        self.stop_decoding(row)
        self.hash_due[row] = NEVER
        self.many_stop_ids.pop(row, None)
        self.free_rows.append(row)

    def start_decoding(self, request: RequestState) -> None:
        """All known tokens are scheduled, and with them the sample that follows if the answer has room for one."""
        row = request.row
        self.num_computed[row] = request.num_tokens
        if request.num_tokens < request.max_len:
            self.compute_end[row] = request.max_len - 1
            self.credit[row] -= 1
        if self._hashes_blocks:
            self.hash_due[row] = (request.chain.num_cached + 1) * self.block_size

    def stop_decoding(self, row: int) -> None:
        """What is held is never drawn."""
        self.compute_end[row] = 0
        self.credit[row] += self.is_held[row]
        self.is_held[row] = False

    def decodable_rows(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero((self.num_computed < self.compute_end) & (self.credit > 0) & ~self.is_held)

    @property
    def awaits_masks(self) -> bool:
        return self.num_grammars > 0 and bool((self.is_held & ~self._has_mask()).any())

    def note_masks(self, rows: npt.NDArray[np.intp], tickets: Int64Array, output_indices: Int32Array) -> None:
        """The rows' masks are there, for these outputs."""
        is_current = self.tickets[rows] == tickets
        self.mask_index[rows[is_current]] = output_indices[is_current]

    def take_drawable_rows(self) -> npt.NDArray[np.intp]:
        """Rows that are held and have their mask; they are held no more."""
        if not self.num_grammars:
            return NO_ROWS
        rows = np.flatnonzero(self.is_held & self._has_mask())
        self.is_held[rows] = False
        return rows

    def _has_mask(self) -> BoolArray:
        # Planning went on as if the token that is held were known.
        has_mask: BoolArray = self.mask_index == self.num_computed - self.num_prompt
        return has_mask

    def append_block(self, rows: npt.NDArray[np.intp], blocks: list[int]) -> Int32Array:
        """Gives each row one more block; returns its index in the row's sequence."""
        idx = self.capacity[rows] // self.block_size
        self.block_ids[rows, idx] = blocks
        self.capacity[rows] += self.block_size
        return idx

    def blocks_of(self, row: int) -> list[int]:
        blocks: list[int] = self.block_ids[row, : self.capacity[row] // self.block_size].tolist()
        return blocks

    def known_ids(self, row: int) -> Int32Array:
        return self.token_ids[row, : self.num_known[row]]

    def are_stops(self, rows: npt.NDArray[np.intp], positions: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Whether each row's token at that position ends its answer."""
        hits: BoolArray = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        for row, stop_ids in self.many_stop_ids.items():
            hits |= (rows == row) & np.isin(token_ids, stop_ids)
        return hits & (positions >= self.min_len[rows])
