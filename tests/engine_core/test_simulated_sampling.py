"""Which fields of sampling the simulated executor computes: all of them, of tokens that are equally
likely."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.test_simulated import CONFIG, MODEL, PROMPT, admit, plan, sampled

SMALL = SimulatedModel(vocab_size=110, first_token_id=100)
DRAWN = SamplingParams(max_tokens=40, seed=4)
GREEDY = replace(DRAWN, temperature=0.0)
EDITED = replace(
    DRAWN,
    max_tokens=30,
    logit_bias={105: 6.0, 3: 8.0},
    presence_penalty=0.5,
    frequency_penalty=1.0,
    top_k=200,
    top_p=0.9,
    bad_words=((105, 105),),
)


def answer(sampling: SamplingParams, model: SimulatedModel = SMALL) -> list[int]:
    return expected_tokens(model, PROMPT, sampling)


@pytest.mark.parametrize("base", [DRAWN, GREEDY], ids=["drawn", "greedy"])
def test_a_bias_of_100_is_the_answer_and_one_of_minus_100_is_never_in_it(
    base: SamplingParams,
) -> None:
    assert set(answer(replace(base, logit_bias={107: 100.0}))) == {107}
    assert set(answer(replace(base, logit_bias={2: 100.0}))) == {2}, "a special token"
    shunned = dict.fromkeys(range(100, 108), -100.0)
    assert set(answer(replace(base, logit_bias=shunned))) == {108, 109}


def test_a_bias_makes_a_token_as_likely_as_it_says() -> None:
    # Ten tokens of logit 0, one of which gets ln 9: it is as likely as nine others.
    sampling = replace(DRAWN, max_tokens=4000, logit_bias={107: float(np.log(9))})
    share = Counter(answer(sampling))[107] / 4000
    assert share == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "neutral",
    [
        {"logit_bias": {107: 0.0}},
        {"logit_bias": {5: -100.0}},
        {"bad_words": ((5,),)},
        {"repetition_penalty": 1.5},
        {"top_p": 0.9999, "logit_bias": {107: 0.0}},
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("base", [DRAWN, GREEDY], ids=["drawn", "greedy"])
def test_a_field_that_edits_no_logit_changes_no_token(
    base: SamplingParams, neutral: dict[str, object]
) -> None:
    assert answer(replace(base, **neutral)) == answer(base)  # type: ignore[arg-type]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.001}], ids=str)
def test_the_narrowest_filter_leaves_the_greedy_token(narrow: dict[str, object]) -> None:
    assert answer(replace(DRAWN, **narrow), MODEL) == answer(GREEDY, MODEL) != answer(DRAWN, MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kept", "num_kept"), [({"top_k": 3}, 3), ({"top_p": 0.25}, 3), ({"min_p": 0.5}, 10)], ids=str
)
def test_filters_keep_as_many_tokens_as_they_say(kept: dict[str, object], num_kept: int) -> None:
    drawn = {
        answer(replace(DRAWN, max_tokens=1, seed=seed, **kept))[0]  # type: ignore[arg-type]
        for seed in range(400)
    }
    assert len(drawn) <= num_kept
    assert len(drawn) > num_kept // 2
    with_bias = {
        answer(replace(DRAWN, max_tokens=1, seed=seed, logit_bias={107: 0.0}, **kept))[0]  # type: ignore[arg-type]
        for seed in range(400)
    }
    assert len(with_bias) <= num_kept


def test_allowed_blocked_and_bad_tokens_are_as_asked() -> None:
    assert set(answer(replace(DRAWN, allowed_token_ids=(101, 104)))) == {101, 104}
    blocked = replace(DRAWN, min_tokens=20, stop_token_ids=(103,), min_tokens_blocked_ids=(103,))
    assert 103 not in answer(blocked)[:20]
    pairs = {(a, b) for a in range(100, 110) for b in range(100, 105)}
    words = answer(replace(DRAWN, bad_words=tuple(pairs)))
    assert not set(itertools.pairwise(words)) & pairs
    assert set(words[1:]) <= set(range(105, 110))


def test_penalties_spread_the_tokens() -> None:
    spread = answer(replace(GREEDY, max_tokens=20, frequency_penalty=2.0))
    assert set(Counter(spread).values()) == {2}
    assert set(Counter(answer(replace(GREEDY, max_tokens=10, presence_penalty=2.0))).values()) == {
        1
    }


def test_the_executor_draws_what_is_expected() -> None:
    executor = SimulatedExecutor(CONFIG, MODEL, verify_every=1)
    steps = [plan(1, start=0, count=20, admitted=admit(EDITED), blocks=(3, 5, 6, 7))]
    steps += [plan(2 + i, start=20 + i, count=1) for i in range(29)]
    reported = [token for step in steps for token in sampled(executor, step)]
    assert reported == expected_tokens(MODEL, PROMPT, EDITED)
    assert reported != expected_tokens(MODEL, PROMPT, replace(DRAWN, max_tokens=30))
    assert 3 in reported
