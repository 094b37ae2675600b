"""Where the executor drafts by itself rows run ahead if that pays best, and the drafters here go on
being looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.request import NewRequest, Speculation
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from tests.engine_core.test_adaptive_speculator import (
    CONFIG,
    DEAR,
    MAX_DRAFTS,
    MODEL,
    NUM_ROWS,
    IsRight,
    Oracle,
)

FLAT = StepCosts.measured([1, 2, 4, 8, 16, 64], [1.0] * 6, gap=0.5)
PLAIN = SamplingParams(max_tokens=300, temperature=1.0)


@dataclass
class Modes:
    """How often rows ran ahead, waited, or did neither, at the end of a step."""

    ahead: int = 0
    waiting: int = 0
    neither: int = 0


class Run:
    """An engine whose executor knows the answers, or a share of them, as do the drafters beside
    it."""

    def __init__(
        self, executor_is_right: IsRight, *others: Oracle, costs: StepCosts = FLAT
    ) -> None:
        config: EngineConfig = replace(CONFIG, num_blocks=800)
        # What the executor drafts this one knows as well: rows run ahead once it was right on the
        # side.
        own = Oracle(executor_is_right, name="own", match_len=8)
        drafters = (own, *others)
        self.speculator = AdaptiveSpeculator(
            drafters,
            costs,
            num_rows=NUM_ROWS,
            max_drafts=MAX_DRAFTS,
            vocab_size=MODEL.vocab_size,
            executor_drafts="own",
        )
        self.executor = SimulatedExecutor(config, MODEL)
        self._is_right = executor_is_right
        self.executor._draft = self._draft  # type: ignore[method-assign]
        self.engine = Engine(config, self.executor, speculator=self.speculator)
        self.answers: dict[int, list[int]] = {}
        for drafter in drafters:
            drafter.answers = self.answers
        self.tokens: dict[int, list[int]] = {}
        self.num_steps = 0

    def _draft(self, row: int, num_known: int, most: int) -> Int32Array:
        request = self.engine._scheduler.rows.table.requests[row]
        assert request is not None
        first = num_known - request.num_prompt_tokens
        right = self.answers[request.key][first : first + most]
        ids = [
            t if self._is_right(request.key, first + j) else (t + 1) % 50
            for j, t in enumerate(right)
        ]
        drafts: Int32Array = self.executor._table.token_ids[0, :0].copy()
        drafts.resize(len(ids), refcheck=False)
        drafts[:] = ids
        return drafts

    def add(
        self, key: int, sampling: SamplingParams = PLAIN, speculation: Speculation | None = None
    ) -> None:
        prompt = [key, 1, 2, 3]
        sampling = replace(sampling, seed=key)
        self.answers[key] = expected_tokens(MODEL, prompt, sampling)
        self.tokens[key] = []
        asked = Speculation() if speculation is None else speculation
        self.engine.add(
            NewRequest(
                key=key, prompt_ids=prompt, output_ids=[], sampling=sampling, speculation=asked
            )
        )

    def run(self) -> Modes:
        modes = Modes()
        while self.engine.has_work():
            output = self.engine.step()
            self.num_steps += 1
            modes.ahead += bool(self.speculator.runs_ahead.any())
            modes.waiting += bool(self.speculator.needs_result.any())
            modes.neither += not (
                self.speculator.runs_ahead.any() or self.speculator.needs_result.any()
            )
            assert not (self.speculator.runs_ahead & self.speculator.needs_result).any()
            if output is not None:
                tokens = iter(output.token_ids)
                for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
                    self.tokens[key] += [next(tokens) for _ in range(num_tokens)]
        assert self.tokens == self.answers
        return modes


def always(key: int, index: int) -> bool:
    return True


def never(key: int, index: int) -> bool:
    return False


def test_rows_run_ahead_where_the_executor_is_right() -> None:
    run = Run(always)
    for key in range(1, 4):
        run.add(key)
    modes = run.run()
    load = run.engine.load()
    assert modes.waiting == 0
    assert modes.ahead > 3 * modes.neither
    assert load.num_accepted_tokens > 650
    assert load.num_accepted_tokens > 0.9 * load.num_draft_tokens


def test_rows_wait_where_another_drafter_is_right_and_the_executor_is_not() -> None:
    """One without drafts of its own cannot be better; one that is wrong is left after a while."""
    run = Run(never, Oracle(always, name="other"))
    run.add(1)
    modes = run.run()
    assert modes.waiting > 2 * (modes.ahead + modes.neither)
    assert run.engine.load().num_accepted_tokens > 200


def test_what_another_drafter_drafts_is_seen_while_rows_run_ahead() -> None:
    run = Run(lambda key, index: index < 100, Oracle(lambda key, index: index >= 100, name="other"))
    run.add(1, replace(PLAIN, max_tokens=600))
    modes = run.run()
    assert modes.ahead > 5
    assert modes.waiting > 20
    assert run.engine.load().num_accepted_tokens > 400


def test_rows_run_ahead_again_where_the_executor_turns_out_to_be_as_good() -> None:
    """Rows wait for a while at most: without the gap the same drafts bring more."""
    run = Run(lambda key, index: index >= 60, Oracle(lambda key, index: True, name="other"))
    run.add(1, replace(PLAIN, max_tokens=780))
    modes = run.run()
    assert modes.ahead > 20


def test_where_each_position_costs_a_step_rows_do_neither() -> None:
    run = Run(always, costs=DEAR)
    run.add(1)
    modes = run.run()
    assert (modes.ahead, modes.waiting) == (0, 0)


def test_rows_stop_running_ahead_when_no_draft_is_accepted_and_steps_take_longer() -> None:
    steep = StepCosts.measured([1, 2, 64], [1.0, 1.3, 20.0], gap=0.1)
    run = Run(lambda key, index: index < 80, costs=steep)
    run.add(1)
    modes = run.run()
    assert 0 < modes.ahead < 100 < modes.neither


def test_a_row_that_the_executor_does_not_serve_waits_and_others_with_it() -> None:
    run = Run(always, Oracle(always, name="other"))
    run.add(1, PLAIN, Speculation(drafter="other"))
    run.add(2)
    modes = run.run()
    # Once it has ended the other one may run ahead.
    assert modes.waiting > 5 * (modes.ahead + modes.neither)


@pytest.mark.parametrize(
    "sampling", [replace(PLAIN, presence_penalty=0.3), replace(PLAIN, num_logprobs=2)]
)
def test_rows_of_every_sampling_run_ahead(sampling: SamplingParams) -> None:
    run = Run(always)
    run.add(1, sampling)
    run.add(2)
    assert run.run().ahead > 10


def test_a_request_that_wants_no_drafts_gets_none_while_others_run_ahead() -> None:
    run = Run(always)
    run.add(1, PLAIN, Speculation(is_on=False))
    run.add(2)
    modes = run.run()
    assert modes.ahead > 10
    table = run.engine._scheduler.rows.table
    assert table.drafts._num_uncertain.sum() == 0
    assert run.engine.load().num_accepted_tokens < 300


def test_a_request_bounds_what_the_executor_drafts_for_it() -> None:
    run = Run(always)
    run.add(1, PLAIN, Speculation(max_tokens=2))
    run.run()
    assert run.engine.load().num_draft_tokens / run.engine.load().num_drafts <= 2
