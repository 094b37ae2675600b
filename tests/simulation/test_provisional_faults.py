"""Steps behind copies that may be wrong: in random schedules, and with faults planted, each of
which is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated import SimulatedExecutor
from headwater.engine_core.kv.block_loads import SettledLoad
from headwater.engine_core.scheduling.provisional_steps import ProvisionalSteps
from headwater.engine_core.scheduling.request_state import RequestState
from headwater.engine_core.scheduling.scheduler import Scheduler
from headwater.engine_core.scheduling.step_builder import StepBuilder
from tests.simulation.provisional_faults import run_seed
from tests.simulation.seeds import breaks

MOST_SEEDS = 600
"""Within which a planted fault has to show."""


def check_seeds(seeds: range) -> None:
    outcomes = [run_seed(seed) for seed in seeds]
    assert sum(each.num_void for each in outcomes) > 0, "nothing is thrown away"
    assert sum(each.num_provisional for each in outcomes) > len(seeds)


def test_no_token_of_a_wrong_copy_is_said() -> None:
    check_seeds(range(100))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nor_in_ten_thousand_seeds() -> None:
    check_seeds(range(1000, 11_000))


def void_step_counts(patch: pytest.MonkeyPatch) -> None:
    """What was computed from wrong blocks is said."""
    patch.setattr(ProvisionalSteps, "is_void", lambda steps, step: False)


def unconfirmed_counts(patch: pytest.MonkeyPatch) -> None:
    """A load that did not end well is not noticed."""
    settle = ProvisionalSteps.settle

    def settle_well(steps: ProvisionalSteps, settled: Sequence[SettledLoad]) -> None:
        settle(
            steps, [SettledLoad(load.ticket, None, load.tier, load.num_loaded) for load in settled]
        )

    patch.setattr(ProvisionalSteps, "settle", settle_well)


def computed_beside_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The executor does not wait for the copy."""
    submit = SimulatedExecutor.submit

    def submit_at_once(executor: SimulatedExecutor, plan: StepPlan) -> int:
        handle = submit(executor, plan)
        executor._compute_awaiting()
        return handle

    patch.setattr(SimulatedExecutor, "submit", submit_at_once)


def retired_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    """A step is retired before it is known what becomes of it."""
    is_due = Engine._is_retirement_due

    def is_due_at_once(engine: Engine, *, has_step: bool) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ProvisionalSteps, "is_open", False)
            return is_due(engine, has_step=has_step)

    # The copy has to go on when the step is done.
    computed_beside_the_copy(patch)
    patch.setattr(Engine, "_is_retirement_due", is_due_at_once)


def cached_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    """Others may hit what was computed from wrong blocks."""
    add_chunk = Scheduler.add_chunk

    def add_and_cache(
        scheduler: Scheduler, step: StepBuilder, request: RequestState, budget: int
    ) -> int:
        step.awaits_copies, awaits = False, step.awaits_copies
        count = add_chunk(scheduler, step, request, budget)
        step.awaits_copies = awaits
        return count

    patch.setattr(Scheduler, "add_chunk", add_and_cache)


def kept_row(patch: pytest.MonkeyPatch) -> None:
    """A request whose step was thrown away goes on as if it had been computed."""
    patch.setattr(ProvisionalSteps, "_take_back", lambda steps, request: None)


PLANTED = [
    void_step_counts,
    unconfirmed_counts,
    computed_beside_the_copy,
    retired_unconfirmed,
    cached_unconfirmed,
    kept_row,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(partial(breaks, run_seed), range(MOST_SEEDS)))
