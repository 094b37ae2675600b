"""Every answer against the types of the official client, strictly: the client itself lets missing
fields pass."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from openai.pagination import SyncConversationCursorPage, SyncCursorPage, SyncPage
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import (
    InputTokenCountResponse,
    Response,
    ResponseItem,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
USER: Any = [{"role": "user", "content": "So?"}]
TIME: Any = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}
NOTE: Any = {"type": "custom", "custom": {"name": "note"}}
FLAT = [
    {"type": "function", "strict": None, **TIME["function"]},
    {"type": "custom", "name": "note"},
]
THINKING = {"chat_template_kwargs": {"opens_thoughts": True}, "thinking_token_budget": 6}
CHATS: list[dict[str, Any]] = [
    {
        "n": 2,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    },
    {
        "tools": [TIME, NOTE],
        "tool_choice": "required",
        "max_tokens": 60,
        "reasoning_effort": "none",
    },
    {
        **THINKING,
        "max_tokens": 12,
        "return_token_ids": True,
        "stream_options": {"continuous_usage_stats": True},
    },
]
ANSWERS: list[dict[str, Any]] = [
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "instructions": "Be brief.", "metadata": {"a": "b"}},
    {"tools": FLAT, "tool_choice": {"type": "custom", "name": "note"}, "reasoning": {"effort": "none"}},
    {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "note"}]}},
    {**THINKING, "text": {"format": {"type": "json_object"}}, "prompt_cache_key": "k", "max_tool_calls": 3},
    {**THINKING, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}},
]  # fmt: skip


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(kind: Any, value: Any) -> Any:
    return adapter(kind).validate_python(value)


def post(gateway: Gateway, path: str, **fields: Any) -> Any:
    reply = gateway.client.post(path, json={"model": MODEL} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("fields", CHATS, ids=str)
def test_chats_have_every_field_whole_and_streamed(
    thinker: Gateway, fields: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "messages": USER, "max_tokens": 8} | fields
    events = thinker.events(CHAT, asked)
    asked.pop("stream_options", None)
    check(ChatCompletion, post(thinker, CHAT, **asked))
    for event in events:
        # The official type of a streamed call knows functions only.
        for call in (
            call for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())
        ):
            if call.get("type") == "custom":
                del call["type"]
        check(ChatCompletionChunk, event)


def test_completions_embeddings_and_models_have_every_field(thinker: Gateway) -> None:
    asked = {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2}
    check(Completion, post(thinker, COMPLETIONS, **asked))
    check(CreateEmbeddingResponse, post(thinker, "/v1/embeddings", input="a"))
    check(SyncPage[Model], thinker.client.get("/v1/models").json())


@pytest.mark.parametrize("fields", ANSWERS, ids=str)
def test_responses_have_every_field_whole_and_streamed(
    thinker: Gateway, fields: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "input": "So?", "max_output_tokens": 40, "temperature": 0} | fields
    whole = post(thinker, RESPONSES, **asked)
    check(Response, whole)
    check(Response, thinker.client.get(f"{RESPONSES}/{whole['id']}").json())
    with thinker.client.stream("POST", RESPONSES, json=asked | {"stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    for line in lines:
        event = check(ResponseStreamEvent, json.loads(line.removeprefix("data: ")))
        assert event.type == json.loads(line.removeprefix("data: "))["type"]


def test_the_tokens_of_a_turn_can_be_counted_before_it_is_asked(thinker: Gateway) -> None:
    asked = {
        "input": "So?",
        "instructions": "Be brief.",
        "tools": FLAT,
        "reasoning": {"effort": "none"},
    }
    counted = check(InputTokenCountResponse, post(thinker, f"{RESPONSES}/input_tokens", **asked))
    whole = post(thinker, RESPONSES, max_output_tokens=1, **asked)
    assert counted.input_tokens == whole["usage"]["input_tokens"]
    more = post(
        thinker, f"{RESPONSES}/input_tokens", previous_response_id=whole["id"], input="And?"
    )
    assert more["input_tokens"] > len("And?")
    refused = thinker.client.post(
        f"{RESPONSES}/input_tokens",
        json={"model": MODEL, "input": "x", "tools": [{"type": "custom", "name": "a b"}]},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].name")


def test_items_of_turns_and_conversations_have_every_field(thinker: Gateway) -> None:
    conversation = thinker.client.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()
    check(Conversation, conversation)
    asked = {
        "tools": FLAT,
        "tool_choice": {"type": "custom", "name": "note"},
        "reasoning": {"effort": "none"},
    }
    made = post(
        thinker,
        RESPONSES,
        input="So?",
        conversation=conversation["id"],
        max_output_tokens=40,
        **asked,
    )
    check(
        SyncCursorPage[ResponseItem],
        thinker.client.get(f"{RESPONSES}/{made['id']}/input_items").json(),
    )
    listed = thinker.client.get(f"/v1/conversations/{conversation['id']}/items").json()
    check(SyncConversationCursorPage[ConversationItem], listed)
    assert [item["type"] for item in listed["data"]] == ["custom_tool_call", "message"]


def test_a_response_repeats_its_request_without_fields_that_were_left_out(thinker: Gateway) -> None:
    nullable = {"type": "object", "properties": {"a": {"enum": ["x", None]}}}
    choice = {"type": "function", "name": "f"}
    tools = [choice | {"parameters": nullable}, {"type": "custom", "name": "note"}]
    limit = {"max_output_tokens": None, "max_tokens": 1}
    more = {"text": {"verbosity": "low"}, "tool_choice": choice, "tools": tools}
    made = post(thinker, RESPONSES, input="x", store=False, **limit, **more)
    assert made["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert made["tool_choice"] == choice
    assert made["tools"] == [tools[0] | {"strict": None}, tools[1]]
    assert made["max_output_tokens"] == made["usage"]["output_tokens"] == 1
