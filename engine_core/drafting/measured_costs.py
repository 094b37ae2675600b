"""Measures the cost of decode steps on an executor before it serves: steps of several sizes, with
rows of no request.

Keys and values go to the scratch block, so nothing of them is left.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from ..config import EngineConfig
from ..executor import AdmittedRow, Executor, Int32Array, StepPlan
from ..sampling_params import SamplingParams
from .step_costs import StepCosts

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of positions; an executor pads to such sizes, or takes longer by the position."""
REPEATS = 5
LEAST_REPEATS = 2
QUICK_SECONDS = 0.05
"""Seconds after which a size is not measured again."""
STEADY_SPREAD = 1.25
"""Most times the least time of a step that its second least may be on a machine which does little
else."""
MOST_SECONDS = 0.5
"""Seconds after which no other size is measured."""
SETTLING_SECONDS = 0.3
"""Seconds in which one position and a whole draft are measured again, until both are steady."""
HOST_SECONDS = 100e-6
"""Seconds from a result to the plan that needs it."""


def measured_costs(
    executor: Executor, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
) -> StepCosts:
    """Costs of decode steps. To be called with nothing in flight. One position and a whole draft
    are measured in any case, which takes a few steps; other sizes in half a second."""
    trial = _Trial(executor, config.max_num_seqs, clock)
    most = min(config.max_positions, config.max_num_batched_tokens)
    whole = min(config.max_draft_tokens + 1, most)
    seconds = trial.settled(1, whole)
    gap = min(max(trial.one_by_one(1) - seconds[1], 0.0), seconds[1]) + HOST_SECONDS
    for size in (*(each for each in SIZES if each < most), most):
        if size not in seconds and trial.seconds < MOST_SECONDS:
            seconds[size] = trial.behind_one_another(size)
    trial.end()
    sizes = sorted(seconds)
    return StepCosts.measured(
        sizes, [seconds[size] for size in sizes], gap, is_steady=trial.is_steady
    )


def measured_passes(
    executor: Executor,
    config: EngineConfig,
    clock: Callable[[], float] = time.perf_counter,
    *,
    most_drafts: int = 0,
) -> StepCosts:
    """Seconds in which a draft model of the executor, or one of its heads, drafts one more token
    for each of a number of rows; the gap is the time that a step with any drafts takes longer.
    `most_drafts`: largest number of its drafts for a row; 0: `max_draft_tokens`. No step may be in
    flight."""
    trial = _Trial(executor, config.max_num_seqs, clock)
    most = min(config.max_positions, config.max_num_batched_tokens)
    longest = min(most_drafts or config.max_draft_tokens, config.max_draft_tokens, most - 1)
    num_rows = min(most // 2, config.max_num_seqs)
    one = trial.longer_with_device(1, 1)
    whole = trial.longer_with_device(1, longest)
    # Time that a step takes longer with any drafts is not part of a pass.
    each = whole / longest if longest == 1 else max(whole - one, 0.0) / (longest - 1)
    begin = max(one - each, 0.0)
    seconds = {1: each}
    if num_rows > 1:
        seconds[num_rows] = max(trial.longer_with_device(num_rows, 1) - begin, 0.0)
    trial.end()
    return StepCosts.measured(
        list(seconds), list(seconds.values()), begin, is_steady=trial.is_steady
    )


class _Trial:
    def __init__(self, executor: Executor, max_rows: int, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._max_rows = max_rows
        self._clock = clock
        self._plans = _Plans()
        self._began = clock()
        self._behind: dict[int, list[float]] = defaultdict(list)
        """Seconds of steps by their number of positions, each time that one was measured."""
        self._is_else_steady = True

    @property
    def is_steady(self) -> bool:
        """Whether each step was measured twice with about the least time of all."""
        return self._is_else_steady and all(map(_is_steady, self._behind.values()))

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def settled(self, *sizes: int) -> dict[int, float]:
        """Seconds of steps of each size while another one is in flight. They are measured in turn,
        since a busy moment would else be that of one size alone."""
        num_rounds = 0
        while True:
            seconds = {size: self.behind_one_another(size) for size in sizes}
            num_rounds += 1
            if self.seconds > SETTLING_SECONDS or (num_rounds >= LEAST_REPEATS and self.is_steady):
                return seconds

    def behind_one_another(self, size: int) -> float:
        """Seconds of a step while another one is in flight, the least that was ever measured. The
        first one allocates memory and kernels for the others."""
        in_flight = [self._submit(size), self._submit(size)]
        self._executor.retire(in_flight.pop(0))

        def step() -> None:
            in_flight.append(self._submit(size))
            self._executor.retire(in_flight.pop(0))

        self._behind[size] += self._repeated(step)
        self._executor.retire(in_flight.pop(0))
        return min(self._behind[size])

    def one_by_one(self, size: int) -> float:
        """Seconds of a step that is launched when the one before it has ended."""
        return self._quickest(lambda: self._executor.retire(self._submit(size)))

    def _quickest(self, step: Callable[[], object]) -> float:
        """Least of some times. Other processes take time too, which is not part of the cost."""
        seconds = self._repeated(step)
        self._is_else_steady = self._is_else_steady and _is_steady(seconds)
        return min(seconds)

    def _repeated(self, step: Callable[[], object]) -> list[float]:
        """Seconds of each of `LEAST_REPEATS` to `REPEATS` times."""
        seconds: list[float] = []
        started = self._clock()
        while len(seconds) < REPEATS:
            start = self._clock()
            step()
            seconds.append(self._clock() - start)
            if self._clock() - started > QUICK_SECONDS and len(seconds) >= LEAST_REPEATS:
                break
        return seconds

    def longer_with_device(self, num_rows: int, num_drafts: int) -> float:
        """Seconds by which a step of rows is longer if the executor makes their drafts,
        `num_drafts` each, itself."""
        given, drafted = (
            self._with_drafts(num_rows, num_drafts, by_device=by_device)
            for by_device in (False, True)
        )
        return max(drafted - given, 0.0)

    def _with_drafts(self, num_rows: int, num_drafts: int, *, by_device: bool) -> float:
        drafts = np.full(num_rows, num_drafts, np.int32)

        def step() -> None:
            self._executor.retire(
                self._executor.submit(self._plans.next(drafts, by_device=by_device))
            )

        # The first one finds memory for the others.
        step()
        return self._quickest(step)

    def end(self) -> None:
        self._executor.retire(self._executor.submit(self._plans.last()))

    def _submit(self, size: int) -> int:
        drafts = np.zeros(min(size, self._max_rows), np.int32)
        drafts[0] = size - drafts.size
        return self._executor.submit(self._plans.next(drafts))


def _is_steady(seconds: list[float]) -> bool:
    quickest, second, *_ = sorted(seconds)
    return second <= STEADY_SPREAD * quickest


class _Plans:
    """Plans of steps whose rows decode behind a prompt of one token. The keys of that token are
    arbitrary, since they change no time. Where there are fewer rows than positions, rows have
    drafts."""

    def __init__(self) -> None:
        self._step = self._num_admitted = 0

    def next(self, num_drafts: Int32Array, *, by_device: bool = False) -> StepPlan:
        """Plan of the next measured step. num_drafts [R] is part of the plan unless the device
        drafts."""
        admitted = [_admitted(row) for row in range(self._num_admitted, num_drafts.size)]
        self._num_admitted = max(self._num_admitted, num_drafts.size)
        self._step += 1
        return _plan(self._step, num_drafts, admitted, [], by_device=by_device)

    def last(self) -> StepPlan:
        """Plan that gives the rows back."""
        self._step += 1
        return _plan(self._step, np.zeros(1, np.int32), [], list(range(1, self._num_admitted)))


def _admitted(row: int) -> AdmittedRow:
    greedy = SamplingParams(temperature=0.0)
    return AdmittedRow(
        row=row,
        token_ids=np.ones(1, np.int32),
        num_prompt_tokens=1,
        sampling=greedy,
        choice_index=0,
    )


def _plan(
    step: int,
    num_drafts: Int32Array,
    admitted: list[AdmittedRow],
    released: list[int],
    *,
    by_device: bool = False,
) -> StepPlan:
    zeros = np.zeros_like(num_drafts)
    ones = np.ones_like(num_drafts)
    is_drafted = bool(num_drafts.any())
    return StepPlan(
        step=step,
        released=released,
        admitted=admitted,
        rows=np.arange(num_drafts.size, dtype=np.int32),
        starts=zeros,
        counts=ones + num_drafts,
        samples=ones.astype(np.bool_),
        output_indices=zeros,
        holds=zeros.astype(np.bool_),
        num_drafts=num_drafts if is_drafted else None,
        draft_ids=np.ones(num_drafts.sum(), np.int32) if is_drafted and not by_device else None,
        shares=False,
    )
