"""Drafted tokens change no bit of an answer on a GPU: their rows of one step compute what steps one
by one compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import (
    SAMPLINGS,
    OracleSpeculator,
    answers_of_a_new_engine,
    new_engine,
)
from tests.engine_core.small_models import Answer, SmallEngine

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(3)
MAX_DRAFTS = 15
SHARES_OF_WRONG_DRAFTS = (0.0, 0.2, 0.5, 1.0)
NEAR_PAGES = [1, 2, 17, 31, *range(58, 68), 100, *range(122, 130), 300]
"""Prompt lengths whose answers cross the ends of blocks of 16 and of 64 tokens, at every offset."""
NEAR_SPLITS = [*range(500, 521), *range(1020, 1031)]
"""Those whose answers cross 512 and 1024 keys, where attention begins another split."""
EVERY_SAMPLING = [
    SamplingParams(max_tokens=40 - i, **fields) for i, fields in enumerate(SAMPLINGS.values())
]
SEEDED = [SamplingParams(temperature=0.9, seed=i, max_tokens=40) for i in range(64)]


def prompts_of(lengths: Iterable[int], shared: int = 0) -> list[list[int]]:
    prefix = RNG.integers(3, 512, shared).tolist()
    return [prefix + RNG.integers(3, 512, length).tolist() for length in lengths]


def check_drafts(
    small: SmallEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    max_drafts: int = MAX_DRAFTS,
    shares: Sequence[float] = SHARES_OF_WRONG_DRAFTS,
    num_rounds: int = 1,
    right: Sequence[Answer] | None = None,
) -> list[Answer]:
    """Holds answers with drafts to those without, tokens and log probabilities; returns the last
    ones. `right`: what an engine of other options answered without drafts."""
    # An answer does not depend on what else a step computes: one sampling a prompt, or all of them
    # in turn.
    each = [samplings[i % len(samplings)] for i in range(len(prompts))]
    plain = right
    if plain is None:
        plain, load = answers_of_a_new_engine(small, prompts, each)
        assert load.num_draft_tokens == 0
    received: list[Answer] = []
    for wrong in shares:
        oracle = OracleSpeculator(plain, wrong, max_drafts).beside(small.config)
        received, load = answers_of_a_new_engine(
            small, prompts, each, oracle, num_rounds=num_rounds
        )
        for i, answer in enumerate(received):
            expected = plain[i % len(plain)]
            assert answer.token_ids == expected.token_ids, (
                wrong,
                i,
                len(prompts[i % len(prompts)]),
            )
            assert answer.logprobs == expected.logprobs, (wrong, i)
        assert load.num_draft_tokens > 0
        if wrong == 0.0:
            assert load.num_accepted_tokens > 0.8 * load.num_draft_tokens
        assert (load.num_accepted_tokens > 0) == (wrong < 1.0)
    return received


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_answers_and_log_probabilities_are_those_without_drafts(
    kind: str, engine_of: Callable[..., SmallEngine]
) -> None:
    samplings = [
        SamplingParams(max_tokens=40 - i % 7, **SAMPLINGS[kind]) for i in range(len(NEAR_PAGES))
    ]
    check_drafts(engine_of(), prompts_of(NEAR_PAGES), samplings)


def test_edits_of_every_kind_count_the_drafts_before_them(
    engine_of: Callable[..., SmallEngine],
) -> None:
    """Few ids are allowed, so that drafts repeat tokens, begin and end bad words, and cross minimum
    lengths."""
    few = {"allowed_token_ids": tuple(range(20, 32)), "bad_words": ((21, 22), (23, 24, 25), (31,))}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    early = {"min_tokens": 11, "min_tokens_blocked_ids": (26, 27), "stop_token_ids": (26, 27)}
    biases = {"logit_bias": {token: token / 200 - 1 for token in range(0, 512, 3)}}
    samplings = [
        SamplingParams(
            temperature=0.9, seed=seed, max_tokens=60, num_logprobs=num_logprobs, **edits, **filters
        )
        for seed, (edits, num_logprobs, filters) in enumerate(
            (edits, num_logprobs, filters)
            for edits in (few, penalties, few | penalties, few | early, penalties | biases, {})
            for num_logprobs in (None, 0, 20)
            for filters in ({}, {"top_k": 8, "top_p": 0.95})
        )
    ]
    check_drafts(
        engine_of(),
        prompts_of(3 + 31 * i % 600 for i in range(len(samplings))),
        samplings,
        num_rounds=2,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40, 130])
def test_rows_of_every_sampling_are_verified_in_one_step(
    num_rows: int, engine_of: Callable[..., SmallEngine]
) -> None:
    """Those of the last number have fewer drafts than they might: no step samples so many
    positions."""
    prompts = prompts_of([1 + i * 37 % 200 for i in range(num_rows)])
    check_drafts(engine_of(max_num_batched_tokens=512), prompts, EVERY_SAMPLING)


def test_every_number_of_drafts_crosses_the_ends_of_pages_and_of_splits(
    engine_of: Callable[..., SmallEngine],
) -> None:
    small = engine_of(max_num_seqs=1000)
    prompts = prompts_of(NEAR_PAGES + NEAR_SPLITS)
    samplings = [SEEDED[0], SamplingParams(max_tokens=30, **SAMPLINGS["log probabilities"])]
    plain, _ = answers_of_a_new_engine(
        small, prompts, [samplings[i % 2] for i in range(len(prompts))]
    )
    for num_drafts in range(1, MAX_DRAFTS + 1):
        check_drafts(
            small, prompts, samplings, max_drafts=num_drafts, shares=[0.0, 0.1], right=plain
        )


@pytest.mark.parametrize("length", [63, 505, 511, 1023])
def test_one_row_alone_is_verified_at_every_number_of_drafts(
    length: int, engine_of: Callable[..., SmallEngine]
) -> None:
    small = engine_of()
    prompts = prompts_of([length])
    for num_drafts in range(1, MAX_DRAFTS + 1):
        check_drafts(small, prompts, SEEDED[:1], max_drafts=num_drafts, shares=[0.0, 0.2])


@pytest.mark.parametrize(
    "options",
    [
        {"async_depth": 1},
        {"async_depth": 2, "max_num_batched_tokens": 260},
        {"async_depth": 4},
        {"block_size": 16, "num_blocks": 2800},
    ],
    ids=str,
)
def test_drafts_beside_prompt_chunks_and_steps_in_flight_change_nothing(
    options: dict[str, int], engine_of: Callable[..., SmallEngine]
) -> None:
    check_drafts(
        engine_of(**options),
        prompts_of(NEAR_PAGES + NEAR_SPLITS),
        EVERY_SAMPLING,
        shares=[0.0, 0.3],
    )


@pytest.mark.parametrize("block_size", [16, 64])
def test_drafts_over_keys_and_values_of_8_bits_change_nothing(
    block_size: int, engine_of: Callable[..., SmallEngine]
) -> None:
    small = engine_of(kv_cache_dtype="fp8", block_size=block_size, num_blocks=44_800 // block_size)
    check_drafts(small, prompts_of(NEAR_PAGES + NEAR_SPLITS), EVERY_SAMPLING, shares=[0.0, 0.3])


@pytest.mark.parametrize(
    "family", ["llama2", "qwen2", "gemma3", "gemma3 whose last layer has a window"]
)
def test_drafts_of_other_families_change_nothing(
    family: str, engine_of: Callable[..., SmallEngine]
) -> None:
    check_drafts(
        engine_of(family), prompts_of([*NEAR_PAGES, 510, 1022]), EVERY_SAMPLING, shares=[0.0, 0.3]
    )


def test_requests_that_are_preempted_between_draft_and_verification_go_on_as_before(
    engine_of: Callable[..., SmallEngine],
) -> None:
    prompts = prompts_of(range(20, 60, 2))
    each = [replace(EVERY_SAMPLING[i % 7], max_tokens=300) for i in range(len(prompts))]
    plain, _ = answers_of_a_new_engine(engine_of(), prompts, each)
    few = engine_of(num_blocks=33, max_num_seqs=64, max_num_batched_tokens=200)
    for wrong in (0.0, 0.3):
        oracle = OracleSpeculator(plain, wrong, MAX_DRAFTS).beside(few.config)
        crowded, load = answers_of_a_new_engine(few, prompts, each, oracle)
        assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in plain]
        assert [answer.logprobs for answer in crowded] == [answer.logprobs for answer in plain]
        assert load.num_preemptions > 0
        assert load.num_accepted_tokens > 0


def test_drafts_behind_a_prefix_hit_and_beside_sharers_change_nothing(
    engine_of: Callable[..., SmallEngine],
) -> None:
    prompts = prompts_of([3 + 29 * i % 300 for i in range(24)], shared=576)
    samplings = [SEEDED[i] if i % 2 else EVERY_SAMPLING[i % 7] for i in range(24)]
    received = check_drafts(engine_of(), prompts, samplings, shares=[0.0, 0.3], num_rounds=2)
    assert all(answer.cached_tokens >= 576 for answer in received[24:])


def test_prefixes_that_hold_accepted_tokens_are_hit_and_are_right(
    engine_of: Callable[..., SmallEngine],
) -> None:
    """The next turn hits blocks of the answer, whose keys steps with drafts wrote, wrong ones among
    them."""
    small = engine_of()
    prompts = prompts_of([40, 70, 100, 200])
    samplings = [SamplingParams(temperature=0.9, seed=i, max_tokens=150) for i in range(4)]
    first, _ = answers_of_a_new_engine(small, prompts, samplings)
    turns = [
        [*prompt, *answer.token_ids, 5, 6, 7] for prompt, answer in zip(prompts, first, strict=True)
    ]
    second, _ = answers_of_a_new_engine(small, turns, samplings)
    drafting = new_engine(
        small, OracleSpeculator([*first, *second], 0.3, MAX_DRAFTS).beside(small.config)
    )
    assert drafting.answer(prompts, *samplings) == first
    again = drafting.answer(turns, *samplings)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in second]
    for prompt, answer in zip(prompts, again, strict=True):
        assert answer.cached_tokens == (len(prompt) + 149) // 64 * 64
    assert drafting.engine.load().num_accepted_tokens > 0
