"""What a GPU drafts by itself changes no bit of an answer, with steps launched ahead of what it
found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from headwater.engine_core.engine import Engine
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.ahead_speculator import AheadSpeculator
from tests.engine_core.many_requests import check_equality
from tests.engine_core.oracle_speculator import answers_of_a_new_engine, new_engine
from tests.engine_core.small_models import SmallEngine
from tests.engine_core.test_drafts_on_gpu import (
    EVERY_SAMPLING,
    MAX_DRAFTS,
    NEAR_PAGES,
    NEAR_SPLITS,
    prompts_of,
)

pytestmark = pytest.mark.gpu
EngineOf = Callable[..., SmallEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=90)
"""A model of random weights repeats itself before long, so that drafts stand."""
PLAIN = [
    GREEDY,
    *(SamplingParams(temperature=0.15 * i, seed=i, max_tokens=90) for i in range(1, 5)),
]


def check_own_drafts(
    small: SmallEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    seeds: Sequence[int | None] = (None, 1),
    num_rounds: int = 1,
) -> None:
    each = [samplings[i % len(samplings)] for i in range(len(prompts))]
    plain, load = answers_of_a_new_engine(small, prompts, each)
    assert load.num_draft_tokens == 0
    for seed in seeds:
        ahead = AheadSpeculator(MAX_DRAFTS, seed).beside(small.config)
        received, load = answers_of_a_new_engine(small, prompts, each, ahead, num_rounds=num_rounds)
        for i, answer in enumerate(received):
            expected = plain[i % len(plain)]
            assert answer.token_ids == expected.token_ids, (seed, i, len(prompts[i % len(prompts)]))
            assert answer.logprobs == expected.logprobs, (seed, i)
        assert load.num_accepted_tokens <= load.num_draft_tokens
        # Few answers may never repeat themselves.
        assert len(prompts) < 7 or load.num_draft_tokens > 0
        assert len(prompts) < 30 or load.num_accepted_tokens > 0


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40, 130])
def test_answers_are_those_without_drafts(num_rows: int, engine_of: EngineOf) -> None:
    prompts = prompts_of([1 + i * 37 % 200 for i in range(num_rows)])
    check_own_drafts(
        engine_of(max_num_batched_tokens=512), prompts, PLAIN if num_rows > 1 else [GREEDY]
    )


def test_ends_of_pages_and_of_splits_are_crossed(engine_of: EngineOf) -> None:
    check_own_drafts(engine_of(), prompts_of(NEAR_PAGES + NEAR_SPLITS), PLAIN)


def test_rows_of_every_sampling_run_ahead_beside_each_other(engine_of: EngineOf) -> None:
    samplings = [each for special in EVERY_SAMPLING for each in (GREEDY, special)]
    check_own_drafts(engine_of(), prompts_of([1 + i * 37 % 200 for i in range(40)]), samplings)


@pytest.mark.parametrize("num_rows", [1, 30])
def test_edits_count_drafts_that_the_host_has_not_seen(num_rows: int, engine_of: EngineOf) -> None:
    """Few allowed ids, so that answers repeat themselves: their bad words begin and end within
    drafts."""
    few = replace(GREEDY, allowed_token_ids=tuple(range(20, 26)), num_logprobs=4)
    samplings = [
        replace(few, bad_words=((20, 21), (22, 23, 24))),
        replace(few, frequency_penalty=0.05, presence_penalty=0.1),
        replace(
            few, temperature=0.3, seed=3, repetition_penalty=1.05, logit_bias={21: 1.0, 25: -1.0}
        ),
        replace(few, min_tokens=33, min_tokens_blocked_ids=(22,)),
    ]
    for first in range(len(samplings) if num_rows == 1 else 1):
        turned = samplings[first:] + samplings[:first]
        check_own_drafts(
            engine_of(), prompts_of([5 + i * 37 % 200 for i in range(num_rows)]), turned
        )


@pytest.mark.parametrize(
    "options",
    [
        {"async_depth": 1},
        {"async_depth": 4},
        {"block_size": 16, "num_blocks": 2800},
        {"max_num_batched_tokens": 260, "num_blocks": 100},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_however_an_engine_is_set(options: dict[str, Any], engine_of: EngineOf) -> None:
    """Few blocks preempt; a prefix is there when the prompts come again."""
    prompts = prompts_of([1 + i * 37 % 200 for i in range(60)], shared=130)
    check_own_drafts(engine_of(**options), prompts, PLAIN, num_rounds=2)


def test_stops_and_ends_of_answers_lie_anywhere_in_a_draft(engine_of: EngineOf) -> None:
    small = engine_of()
    prompts = prompts_of([5 + i for i in range(30)])
    plain, _ = answers_of_a_new_engine(small, prompts, [GREEDY] * len(prompts))
    stops = [answer.token_ids[20 + i] for i, answer in enumerate(plain)]
    samplings = [
        replace(GREEDY, max_tokens=30 + i, stop_token_ids=(stop,)) for i, stop in enumerate(stops)
    ]
    check_own_drafts(small, prompts, samplings)


def test_a_request_is_cancelled_while_its_drafts_are_in_flight(engine_of: EngineOf) -> None:
    small, (first, second) = engine_of(), prompts_of([50, 60])
    (expected,), _ = answers_of_a_new_engine(small, [second], [GREEDY])
    for num_steps in range(1, 12):
        fresh = new_engine(small, AheadSpeculator(MAX_DRAFTS).beside(small.config))
        engine: Engine = fresh.engine
        engine.add(NewRequest(key=0, prompt_ids=first, output_ids=[], sampling=GREEDY))
        fresh._num_asked = 1
        for _ in range(num_steps):
            engine.step()
        engine.cancel(0)
        (answer,) = fresh.answer([second], GREEDY)
        assert answer.token_ids == expected.token_ids
        assert engine.load().num_used_blocks == 0


def check_many(engine_of: EngineOf, kv_cache_dtype: str, count: int) -> None:
    roomy = engine_of(kv_cache_dtype=kv_cache_dtype, max_num_seqs=128)
    crowded = engine_of(
        kv_cache_dtype=kv_cache_dtype,
        block_size=16,
        num_blocks=30,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    load = check_equality(roomy, crowded, count)
    assert load.num_accepted_tokens > 2 * count
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_no_token_and_no_log_probability_of_many_requests_differs(
    kv_cache_dtype: str, engine_of: EngineOf
) -> None:
    check_many(engine_of, kv_cache_dtype, 400)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_no_token_of_five_thousand_requests_differs(
    kv_cache_dtype: str, engine_of: EngineOf
) -> None:
    check_many(engine_of, kv_cache_dtype, 5000)
