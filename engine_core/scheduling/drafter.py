"""What guesses tokens for a row that decodes, so that one step may bring several."""

from __future__ import annotations

from typing import Protocol

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable


class Drafter(Protocol):
    """Guesses cost time only: an executor verifies them, and the answer is what it would be without."""

    max_drafts: int
    """Tokens for one row and step at most, less than a block holds."""

    def serves(self, request: RequestState) -> bool:
        """Whether it guesses for a request; a row of such a one is planned with nothing of it in flight."""

    def draft(self, table: RequestTable, rows: Rows, most: Int32Array) -> tuple[Int32Array, Int32Array]:
        """What may follow the known tokens of `rows`: how many tokens for each, int32 [R], up to most[i], and all of
        them, row by row."""
