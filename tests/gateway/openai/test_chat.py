"""Chat over the whole line, with the official client and on the wire."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.processes import MODEL, Gateway, chat_body

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Any:
    with openai.OpenAI(base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def test_the_official_client_streams_the_text_that_it_gets_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"


def test_the_second_time_a_prompt_is_found_in_the_cache(gateway: Gateway) -> None:
    long_text = "The river runs to the sea. " * 20
    gateway.chat(long_text)
    usage = gateway.chat(long_text)["usage"]
    assert (
        usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16
    )


def test_another_tenant_and_another_salt_find_nothing(gateway: Gateway) -> None:
    long_text = "The lake lies still. " * 20
    gateway.chat(long_text)
    assert (
        gateway.chat(long_text, cache_salt="s")["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 0
    )
    reply = gateway.client.post(
        CHAT, json=chat_body(long_text), headers={"x-tenant": "other"}
    ).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_choices_differ_by_index_and_repeat_with_the_seed(gateway: Gateway) -> None:
    first = gateway.chat(n=3, temperature=1, seed=7)["choices"]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in first}) == 3
    assert gateway.chat(n=3, temperature=1, seed=7)["choices"] == first


def test_streamed_choices_carry_their_index(gateway: Gateway) -> None:
    whole = gateway.chat(n=2, temperature=1, seed=3)["choices"]
    events = gateway.events(CHAT, chat_body(n=2, temperature=1, seed=3))
    for choice in whole:
        pieces = [
            event["choices"][0]
            for event in events
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert (
            "".join(piece["delta"].get("content", "") for piece in pieces)
            == choice["message"]["content"]
        )
        assert pieces[-1]["finish_reason"] == "length"


def test_logprobs_come_with_every_token_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    tokens = whole.choices[0].logprobs.content
    assert tokens is not None
    assert len(tokens) == 5
    assert [len(token.top_logprobs) for token in tokens] == [2] * 5
    assert (
        b"".join(bytes(token.bytes or []) for token in tokens).decode()
        == whole.choices[0].message.content
    )
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == tokens


def test_a_stop_string_is_named_and_cut_from_the_text(gateway: Gateway) -> None:
    text = gateway.chat(max_tokens=12)["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:4]
    choice = gateway.chat(max_tokens=12, stop=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["message"]["content"] == text[: text.index(stop)]
    events = gateway.events(CHAT, chat_body(max_tokens=12, stop=stop))
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        == text[: text.index(stop)]
    )
    assert events[-1]["choices"][0]["stop_reason"] == stop


def test_token_ids_are_returned_when_asked_for(gateway: Gateway) -> None:
    whole = gateway.chat(return_token_ids=True)
    assert len(whole["choices"][0]["token_ids"]) == 8
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    events = gateway.events(CHAT, chat_body(return_token_ids=True))
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [
        token_id for event in events for token_id in event["choices"][0].get("token_ids", [])
    ]
    assert streamed == whole["choices"][0]["token_ids"]


def test_tokens_can_be_written_as_ids(gateway: Gateway) -> None:
    whole = gateway.chat(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)[
        "choices"
    ][0]
    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert tokens == [f"token_id:{token_id}" for token_id in whole["token_ids"]]


def test_continuous_usage_stands_in_every_chunk(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"]
        for event in gateway.events(CHAT, chat_body(stream_options=options))
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_prompt_logprobs_have_an_entry_for_every_token_but_the_first(gateway: Gateway) -> None:
    whole = gateway.chat(prompt_logprobs=1)
    scores = whole["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == whole["usage"]["prompt_tokens"]
    assert all(entry["logprob"] <= 0 for score in scores[1:] for entry in score.values())


def test_a_receipt_says_where_and_why_when_asked_for(gateway: Gateway) -> None:
    reply = gateway.client.post(CHAT, json=chat_body(), headers={"x-headwater-receipt": "1"}).json()
    assert reply["receipt"]["attempts"] == 1
    assert reply["receipt"]["decision"]["candidates"]
    assert "receipt" not in gateway.chat()


def test_request_ids_are_echoed_or_drawn(gateway: Gateway) -> None:
    echoed = gateway.client.post(CHAT, json=chat_body(), headers={"x-request-id": "mine-7"})
    assert echoed.headers["x-request-id"] == "mine-7"
    drawn = gateway.client.post(CHAT, json=chat_body())
    assert drawn.json()["id"] == f"chatcmpl-{drawn.headers['x-request-id']}"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {}, 200),
        ("/v1/nothing", {}, 404),
        (CHAT, {}, 405),
        ("/v1/files", {}, 503),
        ("/v1/models", {"x-priority": "high"}, 400),
        ("/v1/models", {"host": "elsewhere.example"}, 403),
        ("/health", {}, 200),
    ],
)
def test_every_answer_has_a_request_id(
    gateway: Gateway, path: str, headers: dict[str, str], status: int
) -> None:
    for sent, echoed in (({"x-request-id": "mine-8"}, "mine-8"), ({}, None)):
        reply = gateway.client.get(path, headers=headers | sent)
        assert reply.status_code == status
        assert reply.headers["x-request-id"] == echoed or (
            echoed is None and len(reply.headers["x-request-id"]) == 24
        )


def test_max_completion_tokens_is_the_same_field_and_keeps_its_name_in_errors(
    gateway: Gateway,
) -> None:
    assert gateway.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    reply = gateway.client.post(CHAT, json=chat_body(max_completion_tokens=9000))
    assert reply.status_code == 400
    reply = gateway.client.post(CHAT, json=chat_body(max_completion_tokens=0))
    assert reply.json()["error"]["param"] == "max_completion_tokens"


def test_unknown_fields_are_accepted(gateway: Gateway) -> None:
    assert gateway.chat(user="ada", metadata={"a": "b"}, response_format={"type": "text"})[
        "choices"
    ]


def test_messages_may_be_lists_of_text_parts_and_hold_a_conversation(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of a river."}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "Ada"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": parts},
    ]
    assert gateway.chat(messages=messages)["choices"][0]["message"]["role"] == "assistant"
