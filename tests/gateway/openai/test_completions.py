"""Completions over the whole line: each way to give prompts, echo, log probabilities."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, completion_body

COMPLETIONS = "/v1/completions"
PROMPT = "Once upon a time"


def ids_of(gateway: Gateway, text: str) -> list[int]:
    tokens: list[int] = gateway.client.post(
        "/tokenize", json={"model": MODEL, "prompt": text}
    ).json()["tokens"]
    return tokens


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_a_prompt_may_be_text_or_tokens_alone_or_in_a_list(gateway: Gateway) -> None:
    ids = ids_of(gateway, PROMPT)
    other = ids_of(gateway, "Far away")
    text = gateway.complete(PROMPT)["choices"][0]["text"]
    assert gateway.complete(ids)["choices"][0]["text"] == text
    for prompts in ([PROMPT, "Far away"], [ids, other]):
        choices = gateway.complete(prompts)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == text
        assert choices[1]["text"] == gateway.complete("Far away")["choices"][0]["text"]


def test_choices_of_a_batch_are_numbered_prompt_by_prompt(gateway: Gateway) -> None:
    whole = gateway.complete([PROMPT, "Far away"], n=2, temperature=1, seed=5)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 32
    asked = completion_body([PROMPT, "Far away"], n=2, temperature=1, seed=5)
    events = gateway.events(COMPLETIONS, asked)
    assert [text_of(events, index) for index in range(4)] == [
        choice["text"] for choice in whole["choices"]
    ]


def test_the_official_client_completes(gateway: Gateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**asked, logprobs=1)
        pieces = [
            chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)
        ]
    assert "".join(pieces) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert "".join(whole.choices[0].logprobs.tokens or []) == whole.choices[0].text


def test_echo_puts_the_prompt_before_the_answer(gateway: Gateway) -> None:
    answer = gateway.complete(PROMPT)["choices"][0]["text"]
    assert gateway.complete(PROMPT, echo=True)["choices"][0]["text"] == PROMPT + answer
    assert (
        gateway.complete(ids_of(gateway, PROMPT), echo=True)["choices"][0]["text"]
        == PROMPT + answer
    )
    assert (
        text_of(gateway.events(COMPLETIONS, completion_body(PROMPT, echo=True))) == PROMPT + answer
    )


def test_no_tokens_with_echo_return_the_prompt_alone(gateway: Gateway) -> None:
    whole = gateway.complete(PROMPT, echo=True, max_tokens=0)
    assert whole["choices"][0]["text"] == PROMPT
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    assert (
        text_of(gateway.events(COMPLETIONS, completion_body(PROMPT, echo=True, max_tokens=0)))
        == PROMPT
    )


def test_echo_with_logprobs_scores_the_prompt_but_for_its_first_token(gateway: Gateway) -> None:
    ids = ids_of(gateway, PROMPT)
    for max_tokens in (0, 4):
        choice = gateway.complete(PROMPT, echo=True, logprobs=2, max_tokens=max_tokens)["choices"][
            0
        ]
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(ids) + max_tokens
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in scores["token_logprobs"][1:])
        assert "".join(scores["tokens"]) == choice["text"]
        assert scores["text_offset"] == [
            len("".join(scores["tokens"][:i])) for i in range(len(scores["tokens"]))
        ]


def test_offsets_are_those_of_the_text_where_tokens_are_parts_of_characters(
    gateway: Gateway,
) -> None:
    choice = gateway.complete("a 🤖 é, 𒀀 and a", echo=True, logprobs=2, max_tokens=4)["choices"][0]
    scores = choice["logprobs"]
    text = choice["text"]
    assert sum(token.startswith("bytes:") for token in scores["tokens"]) > 4
    whole = [i for i, token in enumerate(scores["tokens"]) if not token.startswith("bytes:")]
    for i in whole:
        offset = scores["text_offset"][i]
        token = scores["tokens"][i]
        assert text[offset : offset + len(token)] == token
    assert len(whole) > 6
    assert all(len(likeliest) >= 2 for likeliest in scores["top_logprobs"][1:])


def test_echoed_scores_are_the_same_in_a_stream(gateway: Gateway) -> None:
    whole = gateway.complete(PROMPT, echo=True, logprobs=1, max_tokens=4)["choices"][0]["logprobs"]
    events = gateway.events(
        COMPLETIONS, completion_body(PROMPT, echo=True, logprobs=1, max_tokens=4)
    )
    columns = [
        event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]
    ]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for column in columns for value in column[name]] == whole[name]


def test_token_ids_stand_with_each_choice(gateway: Gateway) -> None:
    choices = gateway.complete([PROMPT, "Far away"], return_token_ids=True)["choices"]
    assert choices[0]["prompt_token_ids"] == ids_of(gateway, PROMPT)
    assert [len(choice["token_ids"]) for choice in choices] == [8, 8]
    events = gateway.events(COMPLETIONS, completion_body(PROMPT, return_token_ids=True))
    assert events[0]["choices"][0]["prompt_token_ids"] == ids_of(gateway, PROMPT)
    assert [i for event in events for i in event["choices"][0].get("token_ids", [])] == choices[0][
        "token_ids"
    ]


def test_a_prompt_is_cut_to_its_last_tokens(gateway: Gateway) -> None:
    ids = ids_of(gateway, PROMPT)
    whole = gateway.complete(
        PROMPT, truncate_prompt_tokens=2, return_token_ids=True, echo=True, max_tokens=1
    )
    assert whole["choices"][0]["prompt_token_ids"] == ids[-2:]
    assert whole["choices"][0]["text"].startswith(" a time")


def test_a_stop_token_is_named(gateway: Gateway) -> None:
    token_ids = gateway.complete(PROMPT, return_token_ids=True)["choices"][0]["token_ids"]
    choice = gateway.complete(PROMPT, stop_token_ids=[token_ids[3]])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == token_ids[3]


def test_the_best_of_several_are_those_that_are_likeliest_on_average(gateway: Gateway) -> None:
    sampled = {"temperature": 1, "seed": 11, "logprobs": 0, "max_tokens": 6}
    every = gateway.complete(["One", "Two"], n=5, **sampled)
    best = gateway.complete(["One", "Two"], n=2, best_of=5, **sampled)
    means = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    expected = [
        i for start in (0, 5) for i in sorted(range(start, start + 5), key=lambda i: -means[i])[:2]
    ]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in best["choices"]] == [
        every["choices"][i]["text"] for i in expected
    ]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 60
    assert gateway.complete("One", best_of=3, temperature=1)["choices"][0]["logprobs"] is None


@pytest.mark.long
def test_a_body_within_its_limit_is_tokenized_whatever_the_answer_takes(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    asked = {"model": MODEL, "prompt": "a b " * 450_000, "return_token_strs": True}
    with start_gateway(behind, "--max-text-bytes=2000000") as gateway:
        reply = gateway.client.post("/tokenize", json=asked)
    assert reply.status_code == 200, reply.text[:200]
    assert len(reply.content) > 4 << 20
    assert reply.json()["count"] == len(reply.json()["token_strs"]) > 800_000


def test_a_prompt_that_fills_the_context_is_scored(gateway: Gateway) -> None:
    choice = gateway.complete([7] * 8192, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 8192
    assert choice["finish_reason"] == "length"


def test_beams_are_distinct_answers_with_their_text(gateway: Gateway) -> None:
    asked = {"use_beam_search": True, "max_tokens": 6, "return_token_ids": True}
    beams = gateway.complete("A river", n=3, **asked)
    choices = beams["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
    assert beams["usage"]["completion_tokens"] == 18
    for choice in choices:
        ids = {"model": MODEL, "tokens": choice["token_ids"]}
        assert gateway.client.post("/detokenize", json=ids).json()["prompt"] == choice["text"]
    assert gateway.complete("A river", n=2, best_of=3, **asked)["choices"] == choices[:2]
    events = gateway.events("/v1/completions", completion_body("A river", n=3, **asked))
    for choice in choices:
        reported = [
            each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(each["text"] for each in reported) == choice["text"]
        assert [token for each in reported for token in each.get("token_ids", ())] == choice[
            "token_ids"
        ]
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)


def test_the_usage_of_a_beam_search_counts_its_cached_prompt_tokens(
    gateway: Gateway,
) -> None:
    text = (
        "A long prompt that fills some blocks of the cache before a search begins with it, word "
        "for word. " * 3
    )

    def cached_tokens() -> int:
        answer = gateway.complete(text, use_beam_search=True, n=2, max_tokens=3)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_tokens() == 0
    assert cached_tokens() > 0


def test_a_beam_ends_at_a_stop_string_as_other_answers_do(gateway: Gateway) -> None:
    asked = {"use_beam_search": True, "n": 2, "max_tokens": 12, "return_token_ids": True}
    whole = gateway.complete("A river", **asked)["choices"][0]
    middle = len(whole["text"]) // 2
    stop = whole["text"][middle : middle + 4]
    beam = gateway.complete("A river", stop=stop, **asked)["choices"][0]
    assert beam["text"] == whole["text"][: whole["text"].index(stop)]
    assert (beam["finish_reason"], beam["stop_reason"]) == ("stop", stop)
    assert beam["token_ids"] == whole["token_ids"][: len(beam["token_ids"])]
    assert len(beam["token_ids"]) < 12
    body = completion_body("A river", stop=stop, **asked)
    reported = [
        each["choices"][0]
        for each in gateway.events("/v1/completions", body)
        if each["choices"][0]["index"] == 0
    ]
    assert "".join(each["text"] for each in reported) == beam["text"]
    assert [token for each in reported for token in each.get("token_ids", ())] == beam["token_ids"]


def test_the_simulated_executor_computes_biases_and_filters(gateway: Gateway) -> None:
    asked = {"model": MODEL, "prompt": "A river", "max_tokens": 6, "return_token_ids": True}

    def ids(**more: Any) -> list[int]:
        reply = gateway.client.post("/v1/completions", json=asked | more)
        assert reply.status_code == 200, reply.text
        reported: list[int] = reply.json()["choices"][0]["token_ids"]
        return reported

    assert ids(logit_bias={"1000": 100}, seed=1) == [1000] * 6
    assert ids(top_k=1, seed=1) == ids(top_p=1e-6, seed=1) == ids(temperature=0) != ids(seed=1)
