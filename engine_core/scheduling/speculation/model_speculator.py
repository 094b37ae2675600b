"""Drafts by look-up or by the executor's draft model or heads, whichever brings a step more tokens
a second.

All rows wait for their results: both are served where plans are computed as they are submitted, so
that nothing would run beside the wait. Rows under a grammar are drafted by look-up alone, since
their masks are filled for drafts that are known when a step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...drafting.device_drafts import DeviceDrafts
from ...drafting.draft_depths import choose_depth
from ...drafting.draft_lengths import Choice
from ...drafting.proposer import Proposer
from ...drafting.step_costs import StepCosts
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .look_up import ANY, LookUp

NAME = "draft_model"
"""Name by which requests ask for a draft model."""
PROBE_STEPS = 64
"""Steps without a draft after which the model drafts one token for each row: it may have become
easier."""


class ModelSpeculator:
    """See `Speculator`."""

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
        """`drafters` look up; `pass_costs`: seconds of a pass of the draft model by rows, or of one
        of its heads; `num_rows`: of the request table; `name`: of the model; `most`: its drafts
        for a row and step, 0 for `max_drafts`."""
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        self._names = [drafter.name for drafter in drafters]
        self._name = name
        self._most_of_model = min(most or max_drafts, max_drafts)
        # All rows wait, drafted or not, so that a gap would be there in any case.
        self._costs = replace(costs, gap=0.0)
        self._pass_costs = pass_costs
        self._look_up = LookUp(drafters, num_rows=num_rows, most=max_drafts, vocab_size=vocab_size)
        self._by_model = DeviceDrafts(num_rows)
        self._most: Int32Array = np.zeros((2, num_rows), np.int32)
        """Most drafts that each row's request allows: by look-up, and by the model."""
        self._wanted: Int32Array = np.full(num_rows, ANY, np.int32)
        """Index of the look-up proposer that each row's request names."""
        self._num_idle = 0
        """Steps since the last one with drafts."""

    @property
    def num_bytes(self) -> int:
        return self._look_up.num_bytes

    def seat(self, request: RequestState) -> None:
        row = request.row
        asked = request.speculation
        names = self._names
        most = min(asked.max_tokens or self.max_drafts, self.max_drafts) if asked.is_on else 0
        is_looked_up = asked.drafter in ("", *names)
        is_modelled = asked.drafter in ("", self._name) and not request.has_grammar
        self._most[:, row] = most * is_looked_up, min(most, self._most_of_model) * is_modelled
        self._wanted[row] = names.index(asked.drafter) if asked.drafter in names else ANY
        self.needs_result[row] = True
        self._by_model.reset(row)
        chain = request.chain
        self._look_up.seat(row, chain.namespace, chain.tenant, request.num_prompt_tokens)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = False
        self._most[:, row] = 0
        self._look_up.vacate(row, token_ids)

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Ignored: `GrammarDrafts` drafts forced tokens."""

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        self._by_model.note(rows, most, num_drafts, num_accepted)

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        self._look_up.compare(table, rows, first)

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        """Zero for every row: the model drafts within a step, not ahead of it."""
        return np.zeros(rows.size, np.int32)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array | None]:
        by_look_up, most_of_model = np.minimum(most, self._most[:, rows])
        looked_up = self._looked_up(table, rows, by_look_up, total)
        stands = self._by_model.stands(rows, most_of_model, self.max_drafts)
        modelled = choose_depth(stands, self._costs, self._pass_costs, rows.size, total)
        if modelled.gain > looked_up.gain:
            return modelled.num_drafts, None
        self._num_idle = 0 if looked_up.num_drafts.any() else self._num_idle + 1
        if self._num_idle < PROBE_STEPS:
            return looked_up.num_drafts, self._look_up.token_ids[rows]
        self._num_idle = 0
        return np.minimum(most_of_model, 1), None

    def _looked_up(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> Choice:
        """See `LookUp.choose`. What the model drafts instead says all the same how many were
        right."""
        return self._look_up.choose(table, rows, most, self._wanted, self._costs, total)
