"""Custom tools, which take text: over chat, responses and gRPC, whole and streamed, and back into
the conversation."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USER: Any = [{"role": "user", "content": "Which rivers are there?"}]
LARK = (
    'start: "SELECT \\"" NAME "\\"" NL "FROM " NAME\nNAME: /[a-z]{1,4}/\n%import '
    "common.NEWLINE -> NL"
)
REGEX = r'print\("[a-c\\]{2}"\)\n'
MATCHES = {
    "query": re.compile(r'SELECT "[a-z]{1,4}"[\r\n]+FROM [a-z]{1,4}'),
    "code": re.compile(REGEX),
}
GRAMMARS = {"query": ("lark", LARK), "code": ("regex", REGEX)}
TIME: Any = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}
NOTE: Any = {"type": "custom", "custom": {"name": "note", "description": "Takes a note."}}
ASKED: Any = {
    "model": MODEL,
    "messages": USER,
    "max_tokens": 200,
    "temperature": 0,
    "reasoning_effort": "none",
}


def custom(name: str) -> Any:
    syntax, definition = GRAMMARS[name]
    grammar = {"syntax": syntax, "definition": definition}
    return {
        "type": "custom",
        "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}},
    }


def flat(tool: Any) -> Any:
    """As the Responses API has tools."""
    fields = dict(tool[tool["type"]])
    if "grammar" in fields.get("format", {}):
        fields["format"] = {"type": "grammar", **fields["format"]["grammar"]}
    return {"type": tool["type"], **fields}


def named(name: str, kind: str = "custom") -> Any:
    return {"type": kind, kind: {"name": name}}


@pytest.fixture(scope="module")
def client(thinker: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_chat_calls_with_text_that_matches_whole_and_streamed(
    client: openai.OpenAI, name: str
) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named(name)]},
    }
    asked = ASKED | {
        "tools": [TIME, NOTE, custom("query"), custom("code")],
        "parallel_tool_calls": False,
    }
    for choice, reason in ((named(name), "stop"), (allowed, "tool_calls")):
        whole: Any = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        [call] = whole.message.tool_calls
        assert (call.type, call.custom.name, whole.finish_reason) == ("custom", name, reason)
        assert MATCHES[name].fullmatch(call.custom.input), call.custom.input
        assert whole.message.content is None
        chunks: Any = list(client.chat.completions.create(**asked, tool_choice=choice, stream=True))
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        assert (deltas[0].type, deltas[0].custom["name"], bool(deltas[0].id)) == (
            "custom",
            name,
            True,
        )
        assert "".join(delta.custom["input"] for delta in deltas) == call.custom.input
        assert len(deltas) > 2
        assert not any(delta.function for delta in deltas)


def test_a_call_of_a_tool_that_takes_any_text_has_the_text_alone(thinker: Gateway) -> None:
    sent = {
        "grammar": r'start: <[11]> "\n{\"name\": \"note\", \"arguments\": {\"input\": \"a\\nb \\u00e9\"}}\n" <[12]>'
    }
    answer = thinker.client.post(
        CHAT, json=ASKED | {"tools": [NOTE], "structured_outputs": sent}
    ).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "custom",
        "custom": {"name": "note", "input": "a\nb é"},
    }
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_custom_tools_and_their_results_are_part_of_the_prompt(thinker: Gateway) -> None:
    def prompt(*more: Any) -> str:
        asked = ASKED | {
            "messages": [*USER, *more],
            "tools": [custom("query")],
            "tool_choice": "auto",
        }
        ids = thinker.client.post(
            CHAT, json=asked | {"return_token_ids": True, "max_tokens": 1}
        ).json()
        return str(
            thinker.client.post(
                "/detokenize", json={"model": MODEL, "tokens": ids["prompt_token_ids"]}
            ).json()["prompt"]
        )

    call = {"id": "c1", "type": "custom", "custom": {"name": "query", "input": 'SELECT "a"'}}
    reported = prompt(
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rhine"},
    )
    assert json.dumps({"name": "query", "arguments": {"input": 'SELECT "a"'}}) in reported
    assert "Rhine" in reported
    assert "Lark grammar" in reported


def test_a_response_calls_with_text_and_goes_on_from_what_came_of_it(
    client: openai.OpenAI, thinker: Gateway
) -> None:
    asked: Any = {
        "model": MODEL,
        "tools": [flat(TIME), flat(NOTE), flat(custom("query"))],
        "temperature": 0,
    }
    asked |= {"tool_choice": {"type": "custom", "name": "query"}, "reasoning": {"effort": "none"}}
    whole: Any = client.responses.create(**asked, input="Which rivers?")
    [call] = whole.output
    assert (call.type, call.name) == ("custom_tool_call", "query")
    assert MATCHES["query"].fullmatch(call.input)
    assert whole.tool_choice.type == "custom"
    events: Any = list(client.responses.create(**asked, input="Which rivers?", stream=True))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[3:-3]) == {"response.custom_tool_call_input.delta"}
    assert "".join(event.delta for event in events[3:-3]) == events[-3].input == call.input
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Rhine"}
    rest: Any = {**asked, "tool_choice": "none"}
    after: Any = client.responses.create(
        **rest, input=[result], previous_response_id=whole.id, max_output_tokens=4
    )
    spelled: Any = [
        {"role": "user", "content": "Which rivers?"},
        {"type": "custom_tool_call", "call_id": call.call_id, "name": "query", "input": call.input},
        result,
    ]
    same = client.responses.create(**rest, input=spelled, store=False, max_output_tokens=4)
    assert (after.output_text, after.usage.input_tokens) == (
        same.output_text,
        same.usage.input_tokens,
    )


def test_grpc_calls_with_text_too(thinker: Gateway) -> None:
    tools = [
        common_pb2.Tool(name="query", custom_input={"lark": LARK}),
        common_pb2.Tool(name="time"),
    ]
    user = common_pb2.ChatMessage(role="user", content="Which rivers?")
    conversation = processor_pb2.Conversation(
        messages=[user], tools=tools, tool_choice="query", reasoning_effort="none"
    )
    sampling = common_pb2.Sampling(temperature=0, max_tokens=200)
    request = inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=sampling)
    with grpc.insecure_channel(thinker.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        [call] = stub.Chat(request, timeout=60).choices[0].message.tool_calls
        deltas = [
            delta for chunk in stub.ChatStream(request, timeout=60) for delta in chunk.tool_calls
        ]
        request.conversation.messages.append(
            common_pb2.ChatMessage(role="assistant", tool_calls=[call])
        )
        request.conversation.messages.append(
            common_pb2.ChatMessage(role="tool", content="Rhine", tool_call_id=call.id)
        )
        assert stub.Chat(request, timeout=60).usage.prompt_tokens > 0
    assert MATCHES["query"].fullmatch(call.input)
    assert (call.name, call.arguments) == ("query", "")
    assert "".join(delta.input for delta in deltas) == call.input
    assert all(delta.HasField("input") for delta in deltas)


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a'}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "json"}}}]}, "tools[0].custom.format.type"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
    (CHAT, {"tools": [TIME, {"type": "custom", "custom": {"name": "a", "format": GRAMMAR}}]}, "tools[1].custom.format.grammar.definition"),
    (CHAT, {"tools": [NOTE], "tool_choice": named("note", "function")}, "tool_choice.type"),
    (CHAT, {"tools": [NOTE], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
    (CHAT, {"tools": [NOTE], "tool_choice": named("other")}, "tool_choice"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[1].tool_calls[0].custom"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format.definition"),
    (RESPONSES, {"tools": [flat({"type": "custom", "custom": {"name": "a", "format": GRAMMAR}})]}, "tools[0].format.definition"),
    (RESPONSES, {"tools": [flat(NOTE)], "tool_choice": {"type": "function", "name": "note"}}, "tool_choice.type"),
    (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_is_wrong_with_a_custom_tool_is_named(
    thinker: Gateway, path: str, fields: Any, param: str
) -> None:
    good = ASKED if path == CHAT else {"model": MODEL, "input": "x"}
    reply = thinker.client.post(path, json=good | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
