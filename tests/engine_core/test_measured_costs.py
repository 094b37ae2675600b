"""What steps cost is measured on an executor whose time is known."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.measured_costs import HOST_SECONDS, MOST_SECONDS, measured_costs
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import StepPlan, StepResult
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from tests.simulation.tier_faults import PAGES


class TimedExecutor(SimulatedExecutor):
    """Takes some seconds a step and more for each position, and at times a lot longer, on a clock
    of its own; a result is there some seconds after the device is done."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        step: float,
        position: float,
        result: float = 0.0,
        hiccup_every: int = 1 << 30,
        busy: tuple[int, ...] = (),
        busy_seconds: float = 0.0,
    ) -> None:
        """`busy`: steps of so many positions take ten times as long in the first `busy_seconds`."""
        super().__init__(config, SimulatedModel(vocab_size=100))
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self._busy = busy
        self._busy_seconds = busy_seconds
        self._costs = (step, position)
        self._late = result
        self._hiccup_every = hiccup_every
        self._device_ends = 0.0
        self._ends = deque[float]()

    def submit(self, plan: StepPlan) -> int:
        step, position = self._costs
        self.plans.append(plan)
        seconds = step + position * plan.num_tokens
        if len(self.plans) % self._hiccup_every == 0:
            seconds *= 7
        if plan.num_tokens in self._busy and self.now < self._busy_seconds:
            seconds *= 10
        self._device_ends = max(self._device_ends, self.now) + seconds
        self._ends.append(self._device_ends + self._late)
        return super().submit(plan)

    def retire(self, handle: int) -> StepResult:
        self.now = max(self.now, self._ends.popleft())
        return super().retire(handle)

    def measure(self, config: EngineConfig) -> StepCosts:
        costs = measured_costs(self, config, lambda: self.now, vocab_size=100)
        assert not self._ends, "a step is left in flight"
        return costs


def config(
    max_num_seqs: int = 64,
    max_draft_tokens: int = 15,
    max_num_batched_tokens: int = 128,
    num_blocks: int = 40,
) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_draft_tokens=max_draft_tokens,
    )


@pytest.mark.parametrize("hiccup_every", [1 << 30, 4])
def test_a_step_costs_what_it_took_however_often_another_process_came_between(
    hiccup_every: int,
) -> None:
    executor = TimedExecutor(config(), step=1e-3, position=1e-5, hiccup_every=hiccup_every)
    costs = executor.measure(config())
    assert {1, 16, 64} <= set(costs.sizes.tolist())
    np.testing.assert_allclose(costs.seconds, 1e-3 + 1e-5 * costs.sizes)
    np.testing.assert_allclose(costs.of([3, 50]), [1.03e-3, 1.5e-3])


def test_a_machine_that_hardly_ever_computes_undisturbed_is_not_steady() -> None:
    quiet = TimedExecutor(config(), step=3e-2, position=1e-5)
    busy = TimedExecutor(config(), step=3e-2, position=1e-5, hiccup_every=2)
    assert quiet.measure(config()).is_steady
    assert not busy.measure(config()).is_steady


@pytest.mark.parametrize("size", [1, 16])
def test_one_position_and_a_whole_draft_are_measured_until_neither_was_in_a_busy_moment(
    size: int,
) -> None:
    executor = TimedExecutor(config(), step=1e-3, position=1e-5, busy=(size,), busy_seconds=0.1)
    costs = executor.measure(config())
    np.testing.assert_allclose(costs.of([1, 16]), [1.01e-3, 1.16e-3])


def test_a_busy_moment_at_one_size_makes_no_larger_step_dear() -> None:
    executor = TimedExecutor(config(), step=1e-3, position=1e-5, busy=(2, 4), busy_seconds=9.0)
    np.testing.assert_allclose(
        executor.measure(config()).of([1, 2, 4, 8, 16]), [1.01e-3, *[1.08e-3] * 3, 1.16e-3]
    )


def test_a_result_that_comes_late_is_the_gap_of_a_plan_that_needs_it() -> None:
    costs = TimedExecutor(config(), step=1e-3, position=0.0, result=2e-4).measure(config())
    np.testing.assert_allclose(costs.seconds, 1e-3)
    assert costs.gap == pytest.approx(2e-4 + HOST_SECONDS)


def test_a_slow_engine_measures_one_position_and_a_whole_draft_and_no_more() -> None:
    executor = TimedExecutor(config(), step=3.0, position=0.1)
    assert executor.measure(config()).sizes.tolist() == [1, 16]
    assert len(executor.plans) < 12
    quick = TimedExecutor(config(), step=1e-3, position=1e-5)
    quick.measure(config())
    assert quick.now < 2 * MOST_SECONDS


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
def test_a_whole_draft_is_measured_however_few_requests_an_engine_serves_at_once(
    max_num_seqs: int,
) -> None:
    few = config(max_num_seqs)
    costs = TimedExecutor(few, step=1e-3, position=1e-6).measure(few)
    assert 16 in costs.sizes.tolist()
    assert float(costs.of(16)) == pytest.approx(1.016e-3)


def test_steps_are_of_rows_that_an_engine_has_and_of_no_request() -> None:
    limits = config(max_num_seqs=20, max_draft_tokens=7, max_num_batched_tokens=24)
    executor = TimedExecutor(limits, step=1e-3, position=1e-5)
    executor.measure(limits)
    assert [plan.step for plan in executor.plans] == list(range(1, len(executor.plans) + 1))
    for plan in executor.plans:
        assert plan.num_tokens <= 24
        assert plan.rows.max() < 20
    # Each row has a page of its own, which no request has yet.
    pages = np.concatenate([plan.block_ids for plan in executor.plans]).tolist()
    assert sorted(pages) == list(range(1, 21))
    seated = {admitted.row for plan in executor.plans for admitted in plan.admitted}
    given_back = {row for plan in executor.plans for row in plan.released}
    # The row that the last plan computes is taken by whoever is admitted to it.
    assert seated - given_back == {0}


def test_all_tokens_of_a_measured_step_differ() -> None:
    limits = config(num_blocks=80)
    executor = TimedExecutor(limits, step=1e-3, position=1e-5)
    executor.measure(limits)
    tokens: dict[int, int] = {}
    for plan in executor.plans[:-1]:
        tokens |= {each.row: int(each.token_ids[0]) for each in plan.admitted}
        drafts = [] if plan.draft_ids is None else plan.draft_ids.tolist()
        of_step = [*(tokens[row] for row in plan.rows.tolist()), *drafts]
        assert len(set(of_step)) == len(of_step) == plan.num_tokens


def test_rows_without_a_page_share_the_scratch_page_and_a_token() -> None:
    executor = TimedExecutor(config(), step=1e-3, position=1e-5)
    executor.measure(config())
    admitted = [each for plan in executor.plans for each in plan.admitted]
    assert {int(each.token_ids[0]) for each in admitted[39:]} == {1}
    assert max(int(plan.block_ids.max(initial=0)) for plan in executor.plans) == 39


def test_steps_of_a_simulated_model_with_states_are_measured() -> None:
    """Measured rows have no state sets: what they share is compared with no row's tokens."""
    pages = PAGES["states"]
    given = replace(config(), state_pages=pages.state_pages, num_blocks=120)
    executor = SimulatedExecutor(given, pages.model, verify_every=1)
    ticks = count()
    costs = measured_costs(executor, given, lambda: float(next(ticks)), vocab_size=50)
    assert 1 in costs.sizes.tolist()
