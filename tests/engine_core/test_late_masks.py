"""Rows whose masks come apart are drawn together where the later ones come soon, and reported
before all else."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import DrawPlan, StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import PATIENCE_SECONDS
from headwater.engine_core.step_output import MaskReport

CONFIG = EngineConfig(num_blocks=20, max_model_len=128)
MODEL = SimulatedModel(vocab_size=64)


class Recorded(SimulatedExecutor):
    """Notes in which order plans are launched, on a clock of the test's."""

    def __init__(self, timing: SimulatedTiming) -> None:
        super().__init__(CONFIG, MODEL, timing, clock=lambda: self.now, sleep=lambda seconds: None)
        self.now = self.launch_seconds = 0.0
        """Time, and how long it takes to launch a draw."""
        self.tick = 0.0
        """Time that passes for the engine whenever it looks at the clock."""
        self.launched: list[str] = []

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def submit(self, plan: StepPlan) -> int:
        self.launched.append("step")
        return super().submit(plan)

    def draw(self, plan: DrawPlan) -> int:
        self.now += self.launch_seconds
        self.launched.append("draw")
        return super().draw(plan)


class Bench:
    """Requests under masks that allow everything."""

    def __init__(self, *max_tokens: int, step_seconds: float = 0.0) -> None:
        self.executor = Recorded(SimulatedTiming(step_seconds=step_seconds))
        self.reports = list[MaskReport]()
        self.engine = Engine(
            CONFIG,
            self.executor,
            clock=self.executor.clock,
            masks=np.full((1, CONFIG.num_rows, 2), -1, np.int32),
            report_masks=self.reports.append,
        )
        for key, most in enumerate(max_tokens):
            sampling = SamplingParams(max_tokens=most)
            new = NewRequest(
                key=key, prompt_ids=[3, 4, 5], output_ids=[], sampling=sampling, has_grammar=True
            )
            self.engine.add(new)
        self.step()
        (report,) = self.reports
        assert report.wanted is not None
        self.wanted = report.wanted
        self.reports.clear()

    def fill(self, i: int, output_index: int = 0) -> None:
        self.engine.masks_filled([self.wanted.rows[i]], [self.wanted.tickets[i]], [output_index])

    def step(self) -> list[int]:
        """Keys of the requests that got tokens in a few steps."""
        outputs = [self.engine.step() for _ in range(3)]
        return [key for output in outputs if output is not None for key in output.keys]


def test_an_idle_device_waits_a_moment_for_the_masks_of_the_other_rows() -> None:
    bench = Bench(9, 9)
    bench.fill(0)
    assert bench.step() == []
    bench.executor.now += PATIENCE_SECONDS / 2
    assert bench.step() == []
    bench.fill(1)
    assert bench.step() == [0, 1]


def test_rows_that_have_their_masks_go_alone_when_the_moment_is_over() -> None:
    bench = Bench(9, 9)
    bench.fill(0)
    bench.executor.now += 2 * PATIENCE_SECONDS
    assert bench.step() == [0]


def test_an_engine_has_work_while_rows_wait_although_the_moment_ends_in_the_middle_of_a_step() -> (
    None
):
    bench = Bench(9, 9)
    bench.fill(0)
    bench.executor.tick = 0.7 * PATIENCE_SECONDS
    keys = list[int]()
    while bench.engine.has_work():
        output = bench.engine.step()
        keys += [] if output is None else output.keys
    assert keys == [0]


def test_tokens_are_reported_for_masks_but_those_of_answers_that_end() -> None:
    bench = Bench(9, 1)
    bench.fill(0)
    bench.fill(1)
    assert bench.step() == [0, 1]
    (report,) = bench.reports
    assert (report.wanted, report.keys, report.num_tokens, len(report.token_ids)) == (
        None,
        [0],
        [1],
        1,
    )


@pytest.mark.parametrize(
    ("seconds", "launch_seconds", "launched"),
    [(0.5, 0.25, ["draw", "step"]), (0.5, 0.75, ["draw"]), (2.0, 0.25, ["draw"])],
    ids=["busy", "done meanwhile", "done"],
)
def test_the_next_step_is_launched_right_behind_a_draw_while_the_device_computes(
    seconds: float, launch_seconds: float, launched: list[str]
) -> None:
    bench = Bench(9, step_seconds=1.0)
    bench.executor.now += 1.0
    bench.fill(0)
    assert bench.step() == [0]
    assert bench.executor.launched == ["step", "draw", "step"]
    bench.executor.launched.clear()
    bench.fill(0, output_index=1)
    bench.executor.now += seconds
    bench.executor.launch_seconds = launch_seconds
    bench.engine.launch()
    assert bench.executor.launched == launched
