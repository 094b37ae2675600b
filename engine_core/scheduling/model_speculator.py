"""Drafts by look-up or by the executor's draft model, whichever brings a step more tokens a second.

All rows wait for their results: a draft model is served where plans are computed as they are submitted, so that nothing
would run beside the wait. Rows under a grammar are drafted by look-up alone, since their masks are filled for drafts
that are known when a step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwater.engine_core.drafting.draft_depths import choose_depth
from headwater.engine_core.drafting.draft_lengths import Choice
from headwater.engine_core.drafting.drafter import Drafter
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import BoolArray, Int32Array
from headwater.engine_core.scheduling.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.masks import Rows
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.request_table import RequestTable

NAME = "draft_model"
"""As requests name the drafter."""
PROBE_STEPS = 64
"""Steps without a draft after which the model guesses one token for each row: it may have become easier."""


class ModelSpeculator(AdaptiveSpeculator):
    """See `Speculator`."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: StepCosts,
        pass_costs: StepCosts,
        *,
        num_rows: int,
        max_drafts: int,
        vocab_size: int,
    ) -> None:
        """`pass_costs`: seconds of a pass of the draft model by rows; the rest as in `AdaptiveSpeculator`."""
        costs = replace(costs, gap=0.0)
        super().__init__(drafters, costs, num_rows=num_rows, max_drafts=max_drafts, vocab_size=vocab_size)
        self._pass_costs = pass_costs
        self._is_waiting = True
        self._may_model: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that the draft model may guess for."""
        self._num_idle = 0
        """Steps since the last one with drafts."""

    def seat(self, request: RequestState) -> None:
        super().seat(request)
        row, asked = request.row, request.speculation
        self._may_model[row] = asked.is_on and asked.drafter in ("", NAME) and not request.has_grammar
        if self._may_model[row] and asked.drafter == NAME:
            self._most[row] = min(asked.max_tokens or self.max_drafts, self.max_drafts)
            # None of those that look up.
            self._wanted[row] = len(self._drafters)

    def draft(
        self, table: RequestTable, rows: Rows, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        looked_up = self._look_up(table, rows, most, total)
        by_model = self._ask_model(rows, most, total)
        if by_model.gain > looked_up.gain:
            return by_model.num_drafts, None
        self._num_idle = 0 if looked_up.num_drafts.any() else self._num_idle + 1
        if self._num_idle < PROBE_STEPS:
            return looked_up.num_drafts, self._guesses[rows]
        self._num_idle = 0
        return np.minimum(self._most_of_model(rows, most), 1), None

    def _ask_model(self, rows: Rows, most: Int32Array, total: int) -> Choice:
        """How many tokens the draft model would guess for each row, and what they would bring."""
        stands = self._by_executor.stands(rows, self._most_of_model(rows, most), self.max_drafts)
        return choose_depth(stands, self._costs, self._pass_costs, rows.size, total)

    def _most_of_model(self, rows: Rows, most: Int32Array) -> Int32Array:
        return np.minimum(most, self._most[rows]) * self._may_model[rows]
