"""Every row of the sampling contract, inside and outside its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from headwater.proto.common_pb2 import Sampling, Speculative, StructuredOutput
from headwater.services.processor.parameters import (
    RANGES,
    bad_word_sequences,
    check_defaults,
    check_sampling,
    fit_context,
)
from headwater.services.runtime.errors import BadRequest, ContextTooLong
from headwater.services.text.model_limits import ModelLimits, model_defaults
from headwater.services.text.tokenizer import Tokenizer

LIMITS = ModelLimits(vocab_size=1000, max_model_len=100)
NAN = math.nan
INF = math.inf


def check(
    *, stream: bool = False, num_prompt_tokens: int = 10, limits: ModelLimits = LIMITS, **asked: Any
) -> Sampling:
    checked = check_sampling(Sampling(**asked), limits, stream=stream)
    fit_context(checked, list(range(num_prompt_tokens)), limits, prompt_name="prompt")
    return checked


ACCEPTED: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 128},
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"temperature": 0.0, "n": 1},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 10.0},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": ["x"] * 16},
    {"stop_token_ids": [0, 999]},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [999]},
    {"logit_bias": {999: 1.0}},
    {"ignore_eos": True},
    {"min_tokens": 5, "max_tokens": 5},
    {"max_tokens": 1},
    {"max_tokens": 90},
    {"max_tokens": 0, "echo": True},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 20},
    {"prompt_logprobs": 20},
    {"best_of": 3, "n": 3},
    {"best_of": 4, "n": 2},
    {"use_beam_search": False},
    {"use_beam_search": True, "n": 2, "best_of": 10, "temperature": 0, "length_penalty": 0.5},
    {"truncate_prompt_tokens": 1},
    {"truncate_prompt_tokens": 100},
    {"skip_special_tokens": False},
    {"include_stop_str_in_output": True},
    {"speculative": Speculative()},
    {"speculative": Speculative(mode="off", drafter="ngram", max_tokens=1)},
    {"speculative": Speculative(mode="auto", drafter="suffix", max_tokens=31)},
]

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "n is 0; allowed: 1…128"),
    ({"n": 129}, "n", "n is 129; allowed: 1…128"),
    (
        {"n": 2, "temperature": 0.0},
        "n",
        "n is 2 with temperature 0; allowed: 1, greedy is one answer",
    ),
    (
        {"n": 2, "temperature": 9e-6},
        "n",
        "n is 2 with temperature 9e-06; allowed: 1, greedy is one answer",
    ),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; allowed: 0…2"),
    ({"temperature": 2.1}, "temperature", "temperature is 2.1; allowed: 0…2"),
    ({"temperature": NAN}, "temperature", "temperature is nan; allowed: 0…2"),
    ({"temperature": INF}, "temperature", "temperature is inf; allowed: 0…2"),
    ({"top_p": 0.0}, "top_p", "top_p is 0.0; allowed: above 0, up to 1"),
    ({"top_p": 1.1}, "top_p", "top_p is 1.1; allowed: above 0, up to 1"),
    ({"top_p": NAN}, "top_p", "top_p is nan; allowed: above 0, up to 1"),
    ({"top_k": -2}, "top_k", "top_k is -2; allowed: −1 or 0 (off), or at least 1"),
    ({"min_p": -0.1}, "min_p", "min_p is -0.1; allowed: 0…1"),
    ({"min_p": 1.1}, "min_p", "min_p is 1.1; allowed: 0…1"),
    ({"min_p": NAN}, "min_p", "min_p is nan; allowed: 0…1"),
    ({"presence_penalty": -2.1}, "presence_penalty", "presence_penalty is -2.1; allowed: -2…2"),
    ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty is 2.1; allowed: -2…2"),
    ({"presence_penalty": NAN}, "presence_penalty", "presence_penalty is nan; allowed: -2…2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "frequency_penalty is -2.1; allowed: -2…2"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "frequency_penalty is 2.1; allowed: -2…2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "allowed: 1e-06…1e+06"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "allowed: 1e-06…1e+06"),
    (
        {"repetition_penalty": 1e-60},
        "repetition_penalty",
        "repetition_penalty is 1e-60; allowed: 1e-06…1e+06",
    ),
    (
        {"repetition_penalty": 1e39},
        "repetition_penalty",
        "repetition_penalty is 1e+39; allowed: 1e-06…1e+06",
    ),
    ({"repetition_penalty": INF}, "repetition_penalty", "allowed: 1e-06…1e+06"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "allowed: 1e-06…1e+06"),
    ({"stop": ["x"] * 17}, "stop", "stop has 17 strings; allowed: at most 16"),
    ({"stop": ["x", ""]}, "stop", "stop is ['x', '']; allowed: strings that are not empty"),
    (
        {"stop_token_ids": [1000]},
        "stop_token_ids",
        "stop_token_ids is 1000; allowed: token ids 0…999",
    ),
    ({"bad_words": [""]}, "bad_words", "bad_words is ['']; allowed: strings that are not empty"),
    (
        {"allowed_token_ids": [5, 1000]},
        "allowed_token_ids",
        "allowed_token_ids is 1000; allowed: token ids 0…999",
    ),
    ({"logit_bias": {1000: 1.0}}, "logit_bias", "logit_bias is 1000; allowed: token ids 0…999"),
    ({"logit_bias": {5: NAN}}, "logit_bias[5]", "logit_bias[5] is nan; allowed: a finite number"),
    ({"logit_bias": {5: INF}}, "logit_bias[5]", "logit_bias[5] is inf; allowed: a finite number"),
    (
        {"min_tokens": 6, "max_tokens": 5},
        "min_tokens",
        "min_tokens is 6; allowed: 0…5 (max_tokens)",
    ),
    ({"min_tokens": 91}, "min_tokens", "min_tokens is 91; allowed: 0…90 (max_tokens)"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: at least 1, or 0 with echo"),
    (
        {"top_logprobs": 1},
        "top_logprobs",
        "top_logprobs is 1 without logprobs; allowed: with logprobs",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; allowed: 0…20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21; allowed: 0…20"),
    (
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "prompt_logprobs with stream; allowed: without stream",
    ),
    ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; allowed: at least n (2)"),
    (
        {"use_beam_search": True, "n": 11},
        "use_beam_search",
        "use_beam_search with 11 beams; allowed: at most 10",
    ),
    (
        {"use_beam_search": True, "logprobs": True},
        "logprobs",
        "logprobs with use_beam_search; allowed: without use_beam_search",
    ),
    (
        {"use_beam_search": True, "bad_words": ["a"]},
        "bad_words",
        "bad_words with use_beam_search; allowed: without use_beam_search",
    ),
    ({"length_penalty": 2000.0}, "length_penalty", "length_penalty is 2000.0; allowed: -10…10"),
    ({"length_penalty": -2000.0}, "length_penalty", "length_penalty is -2000.0; allowed: -10…10"),
    ({"length_penalty": INF}, "length_penalty", "length_penalty is inf; allowed: -10…10"),
    ({"best_of": 129}, "best_of", "best_of is 129; allowed: 1…128"),
    ({"best_of": 4, "stream": True}, "best_of", "best_of with stream; allowed: without stream"),
    (
        {"best_of": 2, "temperature": 0},
        "best_of",
        "best_of is 2 with temperature 0; allowed: 1, greedy is one answer",
    ),
    (
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens is 0; allowed: at least 1",
    ),
    (
        {"truncate_prompt_tokens": 101},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens is 101; allowed: 1…100",
    ),
    (
        {"speculative": Speculative(mode="on")},
        "speculative.mode",
        "speculative.mode is 'on'; allowed: auto or off",
    ),
    (
        {"speculative": Speculative(drafter="eagle")},
        "speculative.drafter",
        "speculative.drafter is 'eagle'; allowed: ngram, suffix, draft_model, draft_heads",
    ),
    (
        {"speculative": Speculative(max_tokens=0)},
        "speculative.max_tokens",
        "speculative.max_tokens is 0; allowed: 1…31",
    ),
    (
        {"speculative": Speculative(max_tokens=32)},
        "speculative.max_tokens",
        "speculative.max_tokens is 32; allowed: 1…31",
    ),
]


NUMBERS_WITHOUT_RANGE = {
    # Any of 64 bits.
    "seed",
    # Bounded by the context, or by another field.
    *("max_tokens", "min_tokens", "truncate_prompt_tokens", "thinking_token_budget"),
}
NO_NUMBERS = (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)


def test_every_number_of_the_contract_has_a_range() -> None:
    fields = [
        field
        for field in Sampling.DESCRIPTOR.fields
        if field.has_presence and field.type not in NO_NUMBERS
    ]
    row = (
        "give a field a range in RANGES of services/processor/parameters.py, or name it in "
        "NUMBERS_WITHOUT_RANGE here"
    )
    assert {field.name for field in fields} - RANGES.keys() == NUMBERS_WITHOUT_RANGE, row


@pytest.mark.parametrize(
    "name", ["presence_penalty", "min_tokens", "logit_bias", "prompt_logprobs", "structured_output"]
)
def test_a_field_that_changes_how_beams_rank_is_refused_beside_them(name: str) -> None:
    values: dict[str, Any] = {
        "logit_bias": {5: 1.0},
        "structured_output": StructuredOutput(regex="a"),
    }
    with pytest.raises(BadRequest, match=f"{name} with use_beam_search; allowed: without"):
        check(use_beam_search=True, n=2, **{name: values.get(name, 1)})


@pytest.mark.parametrize("asked", ACCEPTED, ids=str)
def test_the_contract_accepts(asked: dict[str, Any]) -> None:
    checked = check(**asked)
    for name, value in asked.items():
        if name not in (
            "top_k",
            "stop",
            "stop_token_ids",
            "bad_words",
            "allowed_token_ids",
            "logit_bias",
        ):
            assert getattr(checked, name) == value


def test_a_chat_cannot_echo_a_prompt_without_an_answer() -> None:
    with pytest.raises(BadRequest) as caught:
        check_sampling(Sampling(max_tokens=0), LIMITS, stream=False, is_chat=True)
    assert caught.value.message == "max_tokens is 0; allowed: at least 1"


def test_a_top_p_that_float32_cannot_hold_keeps_the_likeliest_token() -> None:
    assert np.float32(check(top_p=1e-60).top_p) > 0


@pytest.mark.parametrize(("asked", "param", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_the_contract_refuses_and_names_field_value_and_rule(
    asked: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check(**asked)
    assert caught.value.param == param
    assert sentence in caught.value.message


def test_silence_means_sampling_at_temperature_one_up_to_the_end_of_the_context() -> None:
    checked = check(num_prompt_tokens=30)
    assert (checked.n, checked.temperature, checked.top_p, checked.top_k, checked.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        70,
    )
    assert (
        checked.skip_special_tokens,
        checked.ignore_eos,
        checked.logprobs,
        checked.min_tokens,
    ) == (
        True,
        False,
        False,
        0,
    )
    assert not checked.HasField("seed")


def test_a_models_own_defaults_do_not_stand_beside_beams() -> None:
    limits = ModelLimits(
        vocab_size=1000, max_model_len=100, defaults={"repetition_penalty": 1.5, "max_tokens": 7}
    )
    assert check(limits=limits).repetition_penalty == 1.5
    checked = check(limits=limits, use_beam_search=True, n=2)
    assert (checked.repetition_penalty, checked.max_tokens) == (1.0, 7)


@pytest.mark.parametrize(
    ("defaults", "sentence"),
    [
        ({"temperature": "0.6"}, "temperature is '0.6'; allowed: a number that the field can hold"),
        ({"top_k": 50.5}, "top_k is 50.5; allowed: a number that the field can hold"),
        ({"max_new_tokens": -1}, "max_tokens is -1; allowed: a number that the field can hold"),
        ({"max_new_tokens": 0}, "max_tokens is 0; allowed: at least 1"),
        ({"temperature": 0.6, "top_p": 0}, "top_p is 0.0; allowed: above 0, up to 1"),
    ],
)
def test_a_models_own_default_that_no_request_may_have_is_named(
    defaults: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_defaults(replace(LIMITS, defaults=model_defaults(defaults)))
    assert sentence in caught.value.message
    check_defaults(
        replace(
            LIMITS, defaults=model_defaults({"temperature": 0, "top_k": -1, "max_new_tokens": 4096})
        )
    )


def test_a_models_own_defaults_fill_what_a_client_leaves_out() -> None:
    defaults = model_defaults(
        {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "do_sample": True, "min_p": None}
    )
    limits = ModelLimits(vocab_size=1000, max_model_len=100, defaults=defaults)
    checked = check(limits=limits, top_k=3)
    assert (checked.temperature, checked.top_k, checked.min_p, checked.max_tokens) == (
        0.6,
        3,
        0.0,
        7,
    )


def test_a_models_default_never_exceeds_the_context() -> None:
    limits = ModelLimits(vocab_size=1000, max_model_len=100, defaults={"max_tokens": 4096})
    assert check(limits=limits, num_prompt_tokens=99).max_tokens == 1


def test_biases_are_clamped_and_top_k_is_the_vocabulary_at_most() -> None:
    checked = check(logit_bias={1: 1e6, 2: -1e6, 3: 0.5}, top_k=5000)
    assert dict(checked.logit_bias) == {1: 100.0, 2: -100.0, 3: 0.5}
    assert checked.top_k == 1000


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked", "sentence"),
    [
        (
            100,
            {},
            "the prompt has 100 tokens; allowed: 1…99, so that an answer fits (100 tokens together)",
        ),
        (
            90,
            {"max_tokens": 11},
            "the prompt has 90 tokens and max_tokens 11; allowed: 100 tokens together",
        ),
        (101, {"max_tokens": 0, "echo": True}, "the prompt has 101 tokens; allowed: at most 100"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(
    num_prompt_tokens: int, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ContextTooLong) as caught:
        check(num_prompt_tokens=num_prompt_tokens, **asked)
    assert (caught.value.param, caught.value.code, caught.value.message) == (
        "prompt",
        "context_length_exceeded",
        sentence,
    )


def test_an_echo_alone_may_fill_the_context() -> None:
    assert check(num_prompt_tokens=100, max_tokens=0, echo=True).max_tokens == 0


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="prompt is ''; allowed: at least one token"):
        check(num_prompt_tokens=0)


def test_truncation_keeps_the_last_tokens_of_a_prompt() -> None:
    checked = check_sampling(Sampling(truncate_prompt_tokens=3), LIMITS, stream=False)
    assert fit_context(checked, list(range(500)), LIMITS, prompt_name="prompt") == [497, 498, 499]
    assert checked.max_tokens == 97


def test_bad_words_are_spelled_with_and_without_a_space_before_them(
    demo_tokenizer: Tokenizer,
) -> None:
    sequences = bad_word_sequences(
        ["hello"], lambda text: demo_tokenizer.encode(text, add_special_tokens=False)
    )
    assert [demo_tokenizer.decode(sequence) for sequence in sequences] == ["hello", " hello"]
