"""Contract of speculators: which rows wait for their results or run ahead of them, and which tokens
are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable


class Speculator(Protocol):
    """Drafts cost time only: an executor verifies them, and the answer is what it would be
    without."""

    max_drafts: int
    """Tokens for one row and step at most, less than a block holds."""
    needs_result: BoolArray
    """[rows of the table] whether the row is planned only when no step of it is in flight. Only
    such rows are given drafts by the speculator. May change from step to step."""
    runs_ahead: BoolArray
    """[rows of the table] whether the executor drafts for the row, which is then also planned while
    the number of its tokens is not known. Never set together with `needs_result`. May change from
    step to step."""

    @property
    def num_bytes(self) -> int:
        """Memory that drafters hold, as of when a request last left its row."""

    def seat(self, request: RequestState) -> None:
        """Notes that a request has taken a row."""

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        """Notes that a request with these known tokens leaves its row."""

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Receives the tokens token_ids[i] that the grammar of rows[i] forces after its known
        tokens, which replace earlier ones. The writer of masks sends them; they may be wrong."""

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        """The tokens of `rows` from position first[i] on have become known, at least one each."""

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Notes how drafts of a step came out: up to most[i] tokens were to be drafted for row i;
        so many were, and so many of them were accepted. Called before `settle`."""

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        """Number of tokens that the executor is to draft for each of `rows`, all that decode in a
        step, int32 [R]: up to most[i], which is 0 where the row does not run ahead, and at most
        `total` in all."""

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        """Returns drafts after the known tokens of the decoding rows of a step: counts int32 [R],
        up to most[i], which is 0 where the row does not wait for results, and ids int32 [R, K], or
        None where the executor drafts. There are at most `total` drafted tokens."""
