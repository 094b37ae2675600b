"""Drafts tokens where that brings more of them a second, and else lets plain steps run ahead of
their results.

Drafts from here need results: a row's next plan waits for the last one's, which costs a gap. So
either all rows wait or none: rows that do not wait would be computed beside those that do in every
second step only. An executor that drafts by itself needs no results, so where it serves all rows
they may run ahead, and only lengths come from here. Drafts are also made on the side and compared
with what is sampled, so that acceptance is known before it counts, and the gain of drafts is
compared with the time that steps take, so that costs which were measured wrongly do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...drafting.device_drafts import DeviceDrafts
from ...drafting.draft_lengths import choose
from ...drafting.proposer import Proposer
from ...drafting.step_costs import StepCosts
from ...drafting.trials import Mode, Trials
from ...executor import BoolArray, Int32Array
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .draft_requests import DraftRequests
from .look_up import ANY, LookUp

WORTHWHILE = 1.05
"""Least gain over the present mode for which rows change between waiting and running ahead."""
PACE_MEMORY = 0.75
"""Weight of the gain of the steps before. After one step without a match others may follow with
one: to begin anew costs more than to wait once in vain."""
MOST_PACE = 2.0
"""Gains count as this much at most: however good drafts were, a few steps without any are enough to
stop waiting."""
NO_DRAFTS = 0.95
"""Gain with which a step without drafts is counted: it tells nothing about the gain of drafts."""
REVIEWED_STEPS = 32
"""Number of steps after which rows stop waiting, and whether it is better to run ahead is decided
anew."""
WATCHED_STEPS = 4
"""Interval in steps of looks at other drafters while rows run ahead."""
BARREN_LOOKS = 16
"""Looks in vain after which drafters are looked at `WATCHED_STEPS` times less often."""
MOST_INTERVAL = 16
"""Largest interval in steps of looks while no row is drafted for. A look takes about 35 µs of one
row, 5 % of a step of a small model (2026-11-29)."""


def stopped_clock() -> float:
    """Clock on which no time passes, so that the gain of drafts is not measured."""
    return 0.0


class AdaptiveSpeculator:
    """See `Speculator`."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        costs: StepCosts,
        *,
        num_rows: int,
        max_drafts: int,
        vocab_size: int,
        executor_drafts: str = "",
        clock: Callable[[], float] = stopped_clock,
    ) -> None:
        """`num_rows`: of the request table; `executor_drafts`: which of the proposers the executor
        has as well, if any, for rows without a grammar; `clock`: seconds, by which the gain that
        drafts bring is measured."""
        self.max_drafts = max_drafts
        self.needs_result: BoolArray = np.zeros(num_rows, np.bool_)
        self.runs_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        names = [proposer.name for proposer in proposers]
        self._device = names.index(executor_drafts) if executor_drafts in names else ANY
        """Number of the proposer that the executor has."""
        self._others = [i for i in range(len(names)) if i != self._device]
        self._asked = DraftRequests(names, num_rows, max_drafts, self._device)
        self._costs = costs
        self._look_up = LookUp(proposers, num_rows=num_rows, most=max_drafts, vocab_size=vocab_size)
        self._by_device = DeviceDrafts(num_rows)
        self._trials = Trials(clock)
        self._pace = 1.0
        """Average gain of the last steps of a stretch with drafts."""
        self._num_steps = 0
        self._num_barren = 0
        """Looks in vain since one that was not."""
        self._gain_ahead = self._gain_waiting = 1.0
        """Recent gains of a step while rows run ahead: of running ahead, and of waiting for other
        drafters."""

    @property
    def num_bytes(self) -> int:
        return self._look_up.num_bytes

    def seat(self, request: RequestState) -> None:
        row = request.row
        self._asked.seat(request)
        is_ahead = self._trials.mode is Mode.AHEAD
        self.needs_result[row] = self._trials.mode is Mode.WAITING
        self.runs_ahead[row] = is_ahead and self._asked.may_run_ahead[row]
        self._num_barren = 0
        self._by_device.reset(row)
        chain = request.chain
        self._look_up.seat(row, chain.namespace, chain.tenant, request.num_prompt_tokens)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.needs_result[row] = self.runs_ahead[row] = False
        self._asked.vacate(row)
        self._look_up.vacate(row, token_ids)

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        self._by_device.note(rows, most, num_drafts, num_accepted)
        self._look_up.note_drafted(rows, num_drafts, num_accepted)

    def foresee(
        self, table: RequestTable, rows: RowIndices, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Ignored: `GrammarDrafts` drafts forced tokens."""

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        self._num_steps += 1
        if not self._trials.note(rows.size, int((table.num_known[rows] - first).sum())):
            self._stop()
        if self._look_up.num_tokens[rows].any():
            self._look_up.compare(table, rows, first)
        match self._trials.mode:
            case Mode.PLAIN if self._num_steps % self._watch_interval == 0:
                self._watch(table, rows)
            case Mode.AHEAD if self._others and self._num_steps % WATCHED_STEPS == 0:
                self._watch_others(table, rows)

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        most = np.minimum(most, self._asked.most[rows])
        stands = self._by_device.stands(rows, most, self.max_drafts)
        num_drafts, gain = choose(stands, self._costs.without_gap, rows.size, total)
        self._trials.expected = gain
        gain *= self._trials.factor(Mode.AHEAD)
        self._gain_ahead = PACE_MEMORY * self._gain_ahead + (1 - PACE_MEMORY) * gain
        self._note_pace(gain if num_drafts.any() else NO_DRAFTS)
        if self._pace < 1.0:
            self._stop()
        return num_drafts

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        most = np.minimum(most, self._asked.most[rows])
        num_drafts, gain = self._look_up.choose(
            table, rows, most, self._asked.wanted, self._costs, total
        )
        if not num_drafts.any():
            seconds = float(self._costs.of(rows.size))
            gain = seconds / (seconds + self._costs.gap)
        self._trials.expected = gain
        self._note_pace(gain * self._trials.factor(Mode.WAITING))
        is_reviewed = self._num_steps >= REVIEWED_STEPS and bool(
            self._asked.may_run_ahead[rows].all()
        )
        if self._pace < 1.0 or not self._asked.most[rows].any() or is_reviewed:
            self._stop()
        return num_drafts, self._look_up.token_ids[rows]

    @property
    def _watch_interval(self) -> int:
        """Interval in steps of looks while no row is drafted for."""
        num_barren = self._num_barren // BARREN_LOOKS
        return MOST_INTERVAL if num_barren >= 2 else WATCHED_STEPS**num_barren

    def _watch(self, table: RequestTable, rows: RowIndices) -> None:
        """Looks drafts up on the side while rows do neither, and lets them run ahead or wait if
        that pays."""
        undrafted = self._look_up.undrafted(rows, self._asked.most)
        ahead = 1.0
        asked = table, undrafted, self._asked.most[undrafted], self._asked.wanted[undrafted]
        device = [] if self._device == ANY else [self._device]
        if undrafted.size:
            self._look_up.propose(*asked, device)
        if device and self._asked.may_all_run_ahead:
            by_device = rows[self._look_up.drafted_by[rows] == self._device]
            ahead = self._look_up.gain(table, by_device, self._costs.without_gap)
        if undrafted.size:
            self._look_up.improve(*asked, self._others)
        ahead = self._trials.promised(Mode.AHEAD, ahead)
        waiting = self._look_up.gain(table, rows, self._costs)
        waiting = self._trials.promised(Mode.WAITING, waiting)
        self._num_barren = 0 if max(ahead, waiting) > 1.0 else self._num_barren + 1
        if not self._trials.may_begin(rows.size):
            return
        if ahead > max(WORTHWHILE, waiting):
            self._start_ahead(ahead)
        elif waiting > WORTHWHILE:
            self._start_waiting(waiting)

    def _watch_others(self, table: RequestTable, rows: RowIndices) -> None:
        """Looks drafts up on the side while rows run ahead, and lets them wait instead if that pays
        better."""
        undrafted = self._look_up.undrafted(rows, self._asked.most)
        if undrafted.size:
            self._look_up.propose(
                table,
                undrafted,
                self._asked.most[undrafted],
                self._asked.wanted[undrafted],
                self._others,
            )
        gain = self._look_up.gain(table, rows, self._costs)
        gain = self._trials.promised(Mode.WAITING, gain)
        self._gain_waiting = PACE_MEMORY * self._gain_waiting + (1 - PACE_MEMORY) * gain
        if self._gain_waiting > WORTHWHILE * self._gain_ahead:
            self._stop()
            self._start_waiting(self._gain_waiting)

    def _note_pace(self, gain: float) -> None:
        self._pace = PACE_MEMORY * self._pace + (1 - PACE_MEMORY) * min(gain, MOST_PACE)

    def _start_ahead(self, gain: float) -> None:
        self._start(Mode.AHEAD, gain)
        self._gain_ahead = gain
        self._gain_waiting = 1.0
        self._look_up.end(np.flatnonzero(self._asked.is_seated))
        self.runs_ahead[:] = self._asked.is_seated & self._asked.may_run_ahead

    def _start_waiting(self, gain: float) -> None:
        self._start(Mode.WAITING, gain)
        self.needs_result[:] = self._asked.is_seated

    def _start(self, mode: Mode, gain: float) -> None:
        self._trials.begin(mode, gain)
        self._pace = min(gain, MOST_PACE)
        self._num_steps = 0

    def _stop(self) -> None:
        self._trials.end()
        self.needs_result[:] = self.runs_ahead[:] = False
