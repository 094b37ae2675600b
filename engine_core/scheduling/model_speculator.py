"""Has the executor's draft model guess tokens where that brings more of them a second.

Rows run ahead of their results, since only the executor needs to know how far they came. Rows under a grammar are not
drafted: their masks have to be filled for drafts that are known when the step is planned.
"""

from __future__ import annotations

import numpy as np

from headwater.engine_core.drafting.draft_depths import choose_depth
from headwater.engine_core.drafting.executor_drafts import ExecutorDrafts
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable

NAME = "draft_model"
"""As requests and metrics name the drafter."""
PROBE_STEPS = 64
"""Steps without a draft after which one token is drafted for each row: what is guessed may have become easier."""


class ModelSpeculator:
    """See `Speculator`."""

    def __init__(self, costs: StepCosts, pass_costs: StepCosts, *, num_rows: int, max_drafts: int) -> None:
        """`pass_costs`: seconds of a pass of the draft model by rows; `num_rows`: of the request table."""
        self.max_drafts, self.num_bytes = max_drafts, 0
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._costs, self._pass_costs = costs, pass_costs
        self._acceptance = ExecutorDrafts(num_rows)
        self._most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        self._num_idle = 0
        """Steps since the last one with drafts."""

    def seat(self, request: RequestState) -> None:
        row, asked = request.row, request.speculation
        is_served = asked.is_on and asked.drafter in ("", NAME) and not request.has_grammar
        self.runs_ahead[row] = is_served
        self._most[row] = min(asked.max_tokens or self.max_drafts, self.max_drafts) if is_served else 0
        self._acceptance.reset(row)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.runs_ahead[row], self._most[row] = False, 0

    def settle_drafts(self, rows: Rows, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        self._acceptance.note(rows, most, num_drafts, num_accepted)

    def settle(self, table: RequestTable, rows: Rows, first: Int32Array) -> None:
        """Nothing is guessed here."""

    def lengths(self, rows: Rows, most: Int32Array, total: int) -> Int32Array:
        most = np.minimum(most, self._most[rows])
        stands = self._acceptance.stands(rows, most, self.max_drafts)
        num_drafts, _ = choose_depth(stands, self._costs, self._pass_costs, rows.size, total)
        self._num_idle = 0 if num_drafts.any() else self._num_idle + 1
        if self._num_idle >= PROBE_STEPS:
            self._num_idle = 0
            num_drafts = np.minimum(most, 1)
        return num_drafts

    def draft(self, table: RequestTable, rows: Rows, most: Int32Array, total: int) -> tuple[Int32Array, Int32Array]:
        """No row waits for its result, so there is nothing to guess."""
        return np.zeros(rows.size, np.int32), np.zeros((rows.size, 1), np.int32)
