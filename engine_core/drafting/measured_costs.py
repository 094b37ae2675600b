"""Measures the cost of decode steps on an executor before it serves: steps of several sizes, with
rows of no request.

Keys and values go to pages that no request has yet, and nothing knows them afterwards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

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
"""Largest ratio of a step's second shortest time to its shortest on a machine that does little
else."""
MOST_SECONDS = 0.5
"""Seconds after which no other size is measured."""
SETTLING_SECONDS = 0.3
"""Seconds in which one position and a whole draft are measured again, until both are steady."""
TOKEN_STRIDE = 7919
"""Difference between consecutive token ids of a step, a prime."""
HOST_SECONDS = 100e-6
"""Seconds from a result to the plan that needs it."""


def measured_costs(
    executor: Executor,
    config: EngineConfig,
    clock: Callable[[], float] = time.perf_counter,
    *,
    vocab_size: int,
) -> StepCosts:
    """Costs of decode steps. To be called with nothing in flight. One position and a whole draft
    are measured in any case, which takes a few steps; other sizes in half a second."""
    trial = _Trial(executor, config, vocab_size, clock)
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
    vocab_size: int,
    most_drafts: int = 0,
) -> StepCosts:
    """Seconds in which the executor's draft model, or one of its heads, drafts one more token, by
    number of rows; the gap is the extra time of a step with any drafts. `most_drafts`: most drafts
    of a row; 0: `max_draft_tokens`. No step may be in flight."""
    trial = _Trial(executor, config, vocab_size, clock)
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
    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._max_rows = config.max_num_seqs
        self._clock = clock
        self._plans = _Plans(config, vocab_size)
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
        """Seconds of a step of each size while another one is in flight. Sizes are measured in
        turn, so that a busy moment of the machine affects all."""
        num_rounds = 0
        while True:
            seconds = {size: self.behind_one_another(size) for size in sizes}
            num_rounds += 1
            if self.seconds > SETTLING_SECONDS or (num_rounds >= LEAST_REPEATS and self.is_steady):
                return seconds

    def behind_one_another(self, size: int) -> float:
        """Seconds of a step while another one is in flight, the least of all measurements. The
        first step allocates memory and compiles kernels for the others."""
        in_flight = [self._submit(size), self._submit(size)]
        self._executor.retire(in_flight.pop(0))

        def step() -> None:
            in_flight.append(self._submit(size))
            self._executor.retire(in_flight.pop(0))

        self._behind[size] += self._repeated(step)
        self._executor.retire(in_flight.pop(0))
        return min(self._behind[size])

    def one_by_one(self, size: int) -> float:
        """Seconds of a step that is launched after the one before it has ended."""
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

        # The first step allocates memory for the others.
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
    """Plans of steps whose rows decode after a prompt of one token, whose keys are arbitrary, since
    they do not affect the time. Where there are fewer rows than positions, rows have drafts. The
    tokens of a step differ, as far as the cache has a page for each row: with equal tokens all rows
    of a model with experts would choose the same experts, and a large step would read no more
    weights than a small one. Rows without a page have one token and share page 0."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_groups = config.num_page_groups
        self._max_blocks = config.max_blocks
        self._num_paged = (config.num_blocks - 1) // max(self._num_groups, 1)
        self._step = self._num_admitted = 0

    def next(self, num_drafts: Int32Array, *, by_device: bool = False) -> StepPlan:
        """Plan of the next measured step. num_drafts [R] is part of the plan unless the device
        drafts."""
        rows = range(self._num_admitted, num_drafts.size)
        admitted = [
            _admitted(row, self._tokens(row if row < self._num_paged else 0, 1)) for row in rows
        ]
        self._num_admitted = max(self._num_admitted, num_drafts.size)
        self._step += 1
        plan = self._with_pages(_plan(self._step, num_drafts, admitted, []), rows)
        if by_device or plan.num_drafts is None:
            return plan
        return replace(plan, draft_ids=self._tokens(num_drafts.size, int(num_drafts.sum())))

    def last(self) -> StepPlan:
        """Plan that gives the rows back."""
        self._step += 1
        return _plan(self._step, np.zeros(1, np.int32), [], list(range(1, self._num_admitted)))

    def _with_pages(self, plan: StepPlan, rows: range) -> StepPlan:
        """The plan with a page of each group for rows that it admits."""
        paged = np.arange(rows.start, min(rows.stop, self._num_paged), dtype=np.int32)
        groups = np.arange(self._num_groups, dtype=np.int32)
        return replace(
            plan,
            block_rows=np.repeat(paged, groups.size),
            block_indices=np.tile(groups * self._max_blocks, paged.size),
            block_ids=(1 + paged[:, None] * groups.size + groups).reshape(-1),
        )

    def _tokens(self, first: int, count: int) -> Int32Array:
        """Token ids number `first` and following, spread over the vocabulary."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        return ((1 + numbers * TOKEN_STRIDE) % self._vocab_size).astype(np.int32)


def _admitted(row: int, token_ids: Int32Array) -> AdmittedRow:
    greedy = SamplingParams(temperature=0.0)
    return AdmittedRow(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=1,
        sampling=greedy,
        choice_index=0,
    )


def _plan(
    step: int,
    num_drafts: Int32Array,
    admitted: list[AdmittedRow],
    released: list[int],
) -> StepPlan:
    """Plan of one measured step. Without drafts of the host, the device drafts."""
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
        shares=False,
    )
