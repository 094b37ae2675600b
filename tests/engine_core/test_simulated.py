from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import AdmittedRow, StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.sampling_params import SamplingParams

CONFIG = EngineConfig(num_blocks=9, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)
MODEL = SimulatedModel(vocab_size=1000, first_token_id=100)
PROMPT = list(range(20))


def plan(
    step: int,
    *,
    start: int,
    count: int,
    admitted: AdmittedRow | None = None,
    blocks: tuple[int, ...] = (),
    first_block_idx: int = 0,
    row: int = 0,
) -> StepPlan:
    """A step of one row."""
    return StepPlan(
        step=step,
        released=[],
        admitted=[admitted] if admitted else [],
        block_rows=np.full(len(blocks), row, np.int32),
        block_indices=np.arange(first_block_idx, first_block_idx + len(blocks), dtype=np.int32),
        block_ids=np.array(blocks, np.int32),
        rows=np.array([row], np.int32),
        starts=np.array([start], np.int32),
        counts=np.array([count], np.int32),
        samples=np.array([start + count >= len(PROMPT)]),
        output_indices=np.array([start + count - len(PROMPT)], np.int32),
        holds=np.zeros(1, np.bool_),
    )


def admit(sampling: SamplingParams, *, row: int = 0) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        token_ids=np.array(PROMPT, np.int32),
        num_prompt_tokens=len(PROMPT),
        sampling=sampling,
        choice_index=0,
    )


def sampled(executor: SimulatedExecutor, step: StepPlan) -> list[int]:
    tokens: list[int] = executor.retire(executor.submit(step)).token_ids.ravel().tolist()
    return tokens


def test_a_prompt_in_chunks_and_decoding_give_the_expected_tokens() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL, verify_every=1)
    sampling = SamplingParams(max_tokens=3, seed=4)
    steps = [
        plan(1, start=0, count=7, admitted=admit(sampling), blocks=(3, 5)),
        plan(2, start=7, count=13),
        plan(3, start=20, count=1),
        plan(4, start=21, count=1),
    ]
    assert [token for step in steps for token in sampled(executor, step)] == expected_tokens(
        MODEL, PROMPT, sampling
    )


def test_a_token_follows_from_every_latent_before_it() -> None:
    """A model with keys reads the last entry alone, which stands for those before it."""
    found = []
    for model in (MODEL, replace(MODEL, has_latents=True)):
        executor = SimulatedExecutor(CONFIG, model)
        sampling = SamplingParams(max_tokens=2, seed=4)
        right = sampled(
            executor, plan(1, start=0, count=20, admitted=admit(sampling), blocks=(3, 5))
        )
        assert right == expected_tokens(model, PROMPT, sampling)[:1]
        executor._cache.kv[3 * CONFIG.block_size] += np.uint64(1)
        [token] = sampled(executor, plan(2, start=20, count=1))
        found.append(token == expected_tokens(model, PROMPT, sampling)[1])
    assert found == [True, False]


def test_a_token_from_the_wrong_block_is_a_wrong_token() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL)
    sampling = SamplingParams(max_tokens=1)
    sampled(executor, plan(1, start=0, count=20, admitted=admit(sampling), blocks=(3, 5)))
    # As if the first block had been hit, but another block was given.
    wrong = plan(2, start=16, count=4, admitted=admit(sampling, row=1), blocks=(4, 6), row=1)
    assert sampled(executor, wrong) != expected_tokens(MODEL, PROMPT, sampling)


def test_kv_that_was_overwritten_behind_a_row_is_found() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL, verify_every=3)
    sampling = SamplingParams(max_tokens=3)
    sampled(executor, plan(1, start=0, count=20, admitted=admit(sampling), blocks=(3, 5)))
    sampled(
        executor, plan(2, start=0, count=3, admitted=admit(sampling, row=1), blocks=(3,), row=1)
    )
    executor._cache.kv[3 * 16 + 2] += np.uint64(1)
    with pytest.raises(
        AssertionError, match=r"KV of positions \[2\] in page group 0 is not its own"
    ):
        executor.submit(plan(3, start=20, count=1))


@pytest.mark.parametrize(
    ("ours", "theirs", "is_equal"),
    [
        ({"seed": 1}, {"seed": 2}, False),
        ({"seed": 1}, {"seed": 1}, True),
        ({"seed": 1, "temperature": 0.0}, {"seed": 2, "temperature": 0.0}, True),
    ],
    ids=["another seed", "the same seed", "greedy"],
)
def test_answers_depend_on_the_seed_unless_greedy(
    ours: dict[str, float], theirs: dict[str, float], is_equal: bool
) -> None:
    answers = [
        expected_tokens(MODEL, PROMPT, SamplingParams(**sampling)) for sampling in (ours, theirs)
    ]
    assert (answers[0] == answers[1]) is is_equal


def test_choices_differ() -> None:
    sampling = SamplingParams()
    assert expected_tokens(MODEL, PROMPT, sampling) != expected_tokens(
        MODEL, PROMPT, sampling, choice_index=1
    )


def test_tokens_lie_in_the_range() -> None:
    answer = expected_tokens(MODEL, PROMPT, SamplingParams(max_tokens=300))
    assert all(100 <= token < 1000 for token in answer)
    assert len(set(answer)) > 200


def test_the_end_of_sequence_comes_as_often_as_asked_and_not_before_min_tokens() -> None:
    model = SimulatedModel(
        vocab_size=1000, first_token_id=100, eos_token_id=2, eos_probability=0.25
    )
    answer = expected_tokens(model, PROMPT, SamplingParams(max_tokens=2000))
    assert answer.count(2) == pytest.approx(500, abs=70)
    held = SamplingParams(
        max_tokens=2000, min_tokens=1000, min_tokens_blocked_ids=(2,), stop_token_ids=(2,)
    )
    assert expected_tokens(model, PROMPT, held).index(2) >= 1000


def test_a_resumed_answer_is_the_same() -> None:
    sampling = SamplingParams(max_tokens=30)
    answer = expected_tokens(MODEL, PROMPT, sampling)
    assert expected_tokens(MODEL, PROMPT, sampling, output_ids=answer[:11]) == answer


def test_a_step_takes_its_time_after_the_one_before_it() -> None:
    now = [0.0]
    sleep: Callable[[float], None] = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    timing = SimulatedTiming(step_seconds=2, seconds_per_request=1, seconds_per_prefill_token=0.5)
    executor = SimulatedExecutor(CONFIG, MODEL, timing, clock=lambda: now[0], sleep=sleep)
    first = executor.submit(
        plan(1, start=0, count=20, admitted=admit(SamplingParams()), blocks=(3, 5))
    )
    second = executor.submit(plan(2, start=20, count=1))
    assert not executor.is_ready(first)
    executor.retire(first)
    assert now == [13.0]
    executor.retire(second)
    assert now == [16.0]


def test_a_late_result_is_refused_some_polls_and_then_there() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL, SimulatedTiming(late_polls=5))
    refusals = []
    for step in range(1, 30):
        admitted, blocks = (admit(SamplingParams()), (3, 5)) if step == 1 else (None, ())
        handle = executor.submit(
            plan(step, start=step - 1, count=1, admitted=admitted, blocks=blocks)
        )
        refusals.append([executor.is_ready(handle) for _ in range(6)].index(True))
        executor.retire(handle)
    assert set(refusals) == {0, 1, 2, 3, 4, 5}


def test_logprobs_are_given_to_requests_that_ask() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL)
    sampling = SamplingParams(num_logprobs=3)
    result = executor.retire(
        executor.submit(plan(1, start=0, count=20, admitted=admit(sampling), blocks=(3, 5)))
    )
    assert result.logprobs[0].top_ids[0] == result.token_ids[0, 0]
    assert len(set(result.logprobs[0].top_ids)) == 3
    assert result.logprobs[0].top_logprobs == pytest.approx([-0.693, -1.386, -2.079], abs=1e-3)
