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
    """[rows of the table] whether the row's next plan needs the result of the last one: it is
    planned with nothing of it in flight. Only such rows get drafts from here. May change from step
    to step."""
    runs_ahead: BoolArray
    """[rows of the table] whether the executor drafts for the row: it is planned also while it is
    not known how far it came. Never of a row that needs its result. May change from step to
    step."""

    @property
    def num_bytes(self) -> int:
        """Memory that drafters hold, as of when a request last left its row."""

    def seat(self, request: RequestState) -> None:
        """Notes that a request has taken a row."""

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        """Notes that a request leaves its row, with these known tokens."""

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Takes the tokens token_ids[i] that the grammar of rows[i] forces behind its known tokens,
        in place of earlier ones. They come from the writer of masks, and may be wrong."""

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
        """Drafts behind the known tokens of `rows`, all that decode in a step: how many for each,
        int32 [R], up to most[i], which is 0 where the row does not wait for results; and which,
        int32 [R, K], or None where the executor drafts them. There are at most `total` of them in
        all."""
