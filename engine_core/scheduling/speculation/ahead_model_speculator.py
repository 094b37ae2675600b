"""Drafts by the executor's draft model, of rows that run ahead of their results, and by look-up
where it pays to wait.

For executors that compute while the next step is planned: a row whose drafts are looked up waits
for its last result, and nothing runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...drafting.draft_depths import choose_depth
from ...drafting.proposer import Proposer
from ...drafting.step_costs import StepCosts
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .model_speculator import NAME, PROBE_STEPS, ModelSpeculator

WORTHWHILE = 1.05
"""Least gain over the present mode for which rows change between waiting and running ahead."""
MEMORY = 0.75
"""Weight of the steps before in what a step gains. Steps differ, and to change costs a few of
them."""
REVIEWED_STEPS = 8
"""Interval in steps of looks whether the draft model would pay, while it drafts nothing."""
WATCHED_STEPS = 4
"""Interval in steps of looks at the drafts of look-up, while rows run ahead."""


class AheadModelSpeculator(ModelSpeculator):
    """See `Speculator`. All rows wait or none: others would be computed beside those that wait in
    every second step."""

    def __init__(
        self,
        drafters: Sequence[Proposer],
        costs: StepCosts,
        pass_costs: StepCosts,
        *,
        num_rows: int,
        max_drafts: int,
        vocab_size: int,
        name: str = NAME,
        most: int = 0,
    ) -> None:
        sizes = {"num_rows": num_rows, "max_drafts": max_drafts, "vocab_size": vocab_size}
        super().__init__(drafters, costs, pass_costs, **sizes, name=name, most=most)
        self._costs = costs
        self._is_seated: BoolArray = np.zeros(num_rows, np.bool_)
        self._is_waiting = False
        self._num_steps = 0
        self._gain_ahead = self._gain_waiting = 1.0
        """Averages over the last steps: gain of the model's drafts while rows run ahead, and of
        look-up."""

    def seat(self, request: RequestState) -> None:
        super().seat(request)
        self._is_seated[request.row] = True
        self._set()

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        super().vacate(row, token_ids)
        self._is_seated[row] = False
        self._set()

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        super().settle(table, rows, first)
        self._num_steps += 1
        if not self._is_waiting and self._num_steps % WATCHED_STEPS == 0:
            self._watch(table, rows)

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        if 0 < self._num_idle < PROBE_STEPS and self._num_idle % REVIEWED_STEPS:
            self._num_idle += 1
            return np.zeros(rows.size, np.int32)
        most = np.minimum(most, self._most[1, rows])
        stands = self._by_model.stands(rows, most, self.max_drafts)
        num_drafts, gain = choose_depth(stands, self._costs, self._pass_costs, rows.size, total)
        self._gain_ahead = MEMORY * self._gain_ahead + (1 - MEMORY) * gain
        self._num_idle = 0 if num_drafts.any() else self._num_idle + 1
        if self._num_idle < PROBE_STEPS or total < rows.size:
            return num_drafts
        self._num_idle = 0
        return np.minimum(most, 1)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        looked_up = self._looked_up(table, rows, np.minimum(most, self._most[0, rows]), total)
        self._gain_waiting = MEMORY * self._gain_waiting + (1 - MEMORY) * looked_up.gain
        if self._gain_waiting < self._gain_ahead:
            self._is_waiting = False
            self._set()
        return looked_up.num_drafts, self._look_up.token_ids[rows]

    def _watch(self, table: RequestTable, rows: RowIndices) -> None:
        """Looks drafts up on the side, and lets rows wait if that pays."""
        most = self._most[0]
        undrafted = self._look_up.undrafted(rows, most)
        if undrafted.size:
            self._look_up.propose(
                table, undrafted, most[undrafted], self._wanted[undrafted], range(len(self._names))
            )
        gain = self._look_up.gain(table, rows, self._costs)
        self._gain_waiting = MEMORY * self._gain_waiting + (1 - MEMORY) * gain
        if self._gain_waiting > WORTHWHILE * self._gain_ahead:
            self._is_waiting = True
            self._set()

    def _set(self) -> None:
        self.needs_result[:] = self._is_seated & self._is_waiting
        self.runs_ahead[:] = self._is_seated & (self._most[1] > 0) & (not self._is_waiting)
