"""How many tokens a draft model is asked for, and what a simulated one brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.draft_depths import choose_depth
from headwater.engine_core.drafting.measured_costs import measured_passes
from headwater.engine_core.drafting.proposer import Proposal, Proposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array, StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.request import NewRequest, Speculation
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.ahead_model_speculator import AheadModelSpeculator
from headwater.engine_core.scheduling.speculation.model_speculator import (
    PROBE_STEPS,
    ModelSpeculator,
)
from headwater.engine_core.step_output import EngineLoad

MODEL = SimulatedModel(vocab_size=1000)
MAX_DRAFTS = 7
FLAT = StepCosts.measured([1, 1024], [1.0, 1.0])
FREE = StepCosts.measured([1], [0.0])


def stands(*acceptances: float, most: int = 8) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(acceptances)[:, None] ** np.arange(1, most + 1)


def passes(seconds: float) -> StepCosts:
    return StepCosts.measured([1, 1024], [seconds, seconds])


def test_passes_go_on_as_long_as_the_next_one_brings_more_than_it_costs() -> None:
    # With 80 % accepted, k tokens of a pass of 0.2 steps each bring (1 + 0.8 + … + 0.8^k) / (1 +
    # 0.2 k).
    rates = [(1 + sum(0.8**i for i in range(1, k + 1))) / (1 + 0.2 * k) for k in range(9)]
    found = choose_depth(stands(0.8), FLAT, passes(0.2), 1, 100)
    assert found.num_drafts.tolist() == [int(np.argmax(rates))] == [4]
    assert found.gain == pytest.approx(max(rates))


def test_free_passes_of_sure_tokens_are_all_made() -> None:
    assert choose_depth(stands(1.0, 1.0), FLAT, FREE, 2, 100).num_drafts.tolist() == [8, 8]


def test_nothing_is_drafted_where_a_pass_costs_more_than_it_brings() -> None:
    assert choose_depth(stands(0.3), FLAT, passes(0.31), 1, 100) == (np.zeros(1, np.int32), 1.0)


def test_a_row_whose_drafts_bring_less_than_their_positions_cost_is_left_out_of_passes_for_others() -> (
    None
):
    costs = StepCosts.measured([1, 1024], [1.0, 1.0 + 1023 * 0.3])
    assert choose_depth(stands(0.9, 0.05), costs, passes(0.01), 2, 100).num_drafts.tolist()[1] == 0
    assert choose_depth(stands(0.9, 0.05), costs, passes(0.01), 2, 100).num_drafts.tolist()[0] > 0


def test_no_more_is_drafted_than_a_step_has_room_for() -> None:
    assert choose_depth(stands(0.9, 0.9, 0.9), FLAT, FREE, 3, 7).num_drafts.tolist() == [2, 2, 2]


def config(**more: int) -> EngineConfig:
    given = {
        "num_blocks": 400,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "max_draft_tokens": MAX_DRAFTS,
    } | more
    return EngineConfig(**given)


class KnowingDrafter:
    """Drafts the first tokens of a row's answer and no others, right ones."""

    name = "ngram"
    num_bytes = 0

    def __init__(self, asked: Sequence[NewRequest], num_known: int) -> None:
        self._by_prompt = {len(new.prompt_ids): expected(new) for new in asked}
        self._num_known = num_known
        self._answers: dict[int, tuple[int, list[int]]] = {}

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        self._answers[row] = num_prompt, self._by_prompt[num_prompt][: self._num_known]

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        del self._answers[row]

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        drafts = np.zeros((rows.size, MAX_DRAFTS), np.int32)
        num_drafts = np.zeros(rows.size, np.int32)
        for i, row in enumerate(rows.tolist()):
            num_prompt, answer = self._answers[row]
            right = answer[num_known[i] - num_prompt :][: most[i]]
            num_drafts[i] = len(right)
            drafts[i, : len(right)] = right
        return Proposal(drafts, num_drafts, 16 * np.minimum(num_drafts, 1))


def expected(new: NewRequest) -> list[int]:
    return expected_tokens(MODEL, new.prompt_ids, new.sampling)


def requests(drafter: str = "") -> list[NewRequest]:
    """Prompts of different lengths."""
    return [
        NewRequest(
            key=key,
            prompt_ids=[3 + key] * (1 + key),
            output_ids=[],
            sampling=SamplingParams(temperature=1.0, seed=key % 5, max_tokens=100 + key),
            speculation=Speculation(drafter=drafter),
        )
        for key in range(24)
    ]


def run(
    asked: Sequence[NewRequest],
    drafters: Sequence[Proposer],
    *,
    depth: int = 2,
    kind: type[ModelSpeculator] = ModelSpeculator,
    pass_seconds: float = 0.05,
    gap: float = 0.0,
) -> tuple[EngineLoad, int]:
    """Checks answers beside a draft model of which 70 % is right; returns what became of drafts,
    and the steps."""
    executor = SimulatedExecutor(config(async_depth=depth), MODEL, draft_acceptance=0.7)
    sizes = {"num_rows": 64, "max_drafts": MAX_DRAFTS, "vocab_size": 1000}
    speculator = kind(drafters, replace(FLAT, gap=gap), passes(pass_seconds), **sizes)
    engine = Engine(config(async_depth=depth), executor, speculator=speculator)
    tokens: list[list[int]] = [[] for _ in asked]
    num_steps = 0
    for new in asked:
        engine.add(new)
    while engine.has_work():
        output = engine.step()
        num_steps += 1
        at = 0
        for key, count in (
            zip(output.keys, output.num_tokens, strict=True) if output is not None else ()
        ):
            tokens[key] += output.token_ids[at : at + count]
            at += count
    assert tokens == [expected(new) for new in asked]
    load = engine.load()
    assert load.num_used_blocks == 0
    return load, num_steps


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_answers_beside_a_simulated_draft_model_are_the_plain_ones_in_fewer_steps(
    depth: int,
) -> None:
    load, num_steps = run(requests(), [], depth=depth)
    assert load.num_accepted_by_position[0] / load.num_drafts == pytest.approx(0.7, abs=0.05)
    # Without drafts the longest answer takes 123 steps.
    assert num_steps < 80


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rows_run_ahead_of_what_the_model_drafted(depth: int) -> None:
    load, num_steps = run(requests(), [], depth=depth, kind=AheadModelSpeculator, gap=0.5)
    assert load.num_accepted_by_position[0] / load.num_drafts == pytest.approx(0.7, abs=0.05)
    assert num_steps < 80


@pytest.mark.long
def test_rows_that_run_ahead_wait_for_look_up_where_it_promises_more_than_that_costs() -> None:
    asked = requests()
    shares = []
    for num_known, gap in ((1000, 0.1), (1000, 50.0), (0, 0.1)):
        load, _ = run(asked, [KnowingDrafter(asked, num_known)], kind=AheadModelSpeculator, gap=gap)
        shares.append(load.num_accepted_tokens / load.num_draft_tokens)
    assert shares[0] > 0.85
    assert max(shares[1:]) < 0.75


@pytest.mark.long
def test_rows_that_run_ahead_stop_waiting_when_look_up_finds_nothing_more() -> None:
    asked = requests()
    load, steps = run(asked, [KnowingDrafter(asked, 50)], kind=AheadModelSpeculator, gap=0.1)
    _, by_model = run(asked, [], kind=AheadModelSpeculator, gap=0.1)
    assert steps < by_model
    assert 0.7 < load.num_accepted_tokens / load.num_draft_tokens < 0.95


def test_a_model_that_brings_nothing_is_tried_now_and_then_while_rows_run_ahead() -> None:
    asked = [
        replace(requests()[0], sampling=SamplingParams(temperature=1.0, seed=1, max_tokens=200))
    ]
    load, _ = run(asked, [], kind=AheadModelSpeculator, pass_seconds=1.0)
    assert load.num_draft_tokens == load.num_drafts == 200 // PROBE_STEPS


def test_look_up_drafts_where_it_promises_more_and_the_model_elsewhere() -> None:
    """Right drafts of look-up cost no pass of the model."""
    asked = requests()
    by_model, most_steps = run(asked, [KnowingDrafter(asked, 0)])
    by_both, steps = run(asked, [KnowingDrafter(asked, 50)])
    by_look_up, fewest_steps = run(asked, [KnowingDrafter(asked, 1000)])
    shares = [
        load.num_accepted_tokens / load.num_draft_tokens for load in (by_model, by_both, by_look_up)
    ]
    assert shares[0] < shares[1] < shares[2]
    assert shares[0] < 0.75
    assert shares[2] > 0.95
    assert fewest_steps < steps < most_steps


@pytest.mark.long
def test_a_request_that_names_the_model_or_look_up_is_drafted_by_it_alone() -> None:
    asked = requests("draft_model")
    for kind in (ModelSpeculator, AheadModelSpeculator):
        asked = requests("draft_model")
        load, _ = run(asked, [KnowingDrafter(asked, 1000)], kind=kind)
        assert load.num_accepted_tokens < 0.75 * load.num_draft_tokens
        asked = requests("ngram")
        load, _ = run(asked, [KnowingDrafter(asked, 1000)], kind=kind)
        assert load.num_accepted_tokens == load.num_draft_tokens > 1000


class PassExecutor(SimulatedExecutor):
    """Takes time for positions, and for each pass of a draft model, on a clock of its own."""

    def __init__(self, limits: EngineConfig, begin: float = 0.0) -> None:
        """`begin`: seconds before the first pass."""
        super().__init__(limits, MODEL, draft_acceptance=0.5)
        self.now = 0.0
        self._begin = begin

    def submit(self, plan: StepPlan) -> int:
        self.now += 1e-3 + 1e-5 * plan.num_tokens
        if plan.num_drafts is not None and plan.draft_ids is None:
            rows = int(np.count_nonzero(plan.num_drafts))
            self.now += self._begin + int(plan.num_drafts.max()) * (2e-4 + 1e-6 * rows)
        return super().submit(plan)


def test_a_pass_of_the_draft_model_costs_what_steps_take_longer_with_it() -> None:
    executor = PassExecutor(config(max_num_seqs=64, max_num_batched_tokens=128))
    found = measured_passes(
        executor,
        config(max_num_seqs=64, max_num_batched_tokens=128),
        lambda: executor.now,
        vocab_size=100,
    )
    np.testing.assert_allclose(found.of([1, 20, 35]), [2.01e-4, 2.2e-4, 2.35e-4], rtol=1e-6)


def test_passes_of_an_engine_of_one_row_are_measured_at_one_row() -> None:
    executor = PassExecutor(config(max_num_seqs=1, max_num_batched_tokens=4))
    found = measured_passes(
        executor,
        config(max_num_seqs=1, max_num_batched_tokens=4),
        lambda: executor.now,
        vocab_size=100,
    )
    assert found.sizes.tolist() == [1]


def test_the_fixed_cost_of_drafting_is_no_part_of_a_pass() -> None:
    limits = config(max_num_seqs=64, max_num_batched_tokens=128)
    executor = PassExecutor(limits, 5e-4)
    found = measured_passes(executor, limits, lambda: executor.now, vocab_size=100)
    assert found.gap == pytest.approx(5e-4)
    np.testing.assert_allclose(found.of([1, 35]), [2.01e-4, 2.35e-4], rtol=1e-6)
    assert choose_depth(stands(0.6), FLAT, passes(0.05), 1, 100).num_drafts.any()
    assert not choose_depth(
        stands(0.6), FLAT, replace(passes(0.05), gap=2.0), 1, 100
    ).num_drafts.any()
