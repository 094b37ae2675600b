"""Hints on cached blocks in bodies of chats and completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.cache_hints import NO_HINTS, CacheHints
from headwater.gateway.openai.cache_hints import hints_of
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.response_schema import ResponsesRequest
from headwater.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from headwater.services.runtime.errors import BadRequest

TOOL_RESULT = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "A river."},
]  # fmt: skip


CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "A river."}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "1", "output": "A river."}


def chat(**fields: Any) -> CacheHints:
    messages = fields.pop("messages", [{"role": "user", "content": "Hello."}])
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return hints_of(decode(body, ChatCompletionRequest))


def test_the_last_message_tells_a_tools_turn_from_a_persons() -> None:
    assert chat() == CacheHints(turn_kind="person")
    assert chat(messages=TOOL_RESULT) == CacheHints(turn_kind="tool")
    body = b'{"model": "m", "prompt": "a"}'
    assert hints_of(decode(body, CompletionRequest)) == NO_HINTS


def response(**fields: Any) -> CacheHints:
    body = json.dumps({"model": "m", "input": "Hello.", **fields}).encode()
    return hints_of(decode(body, ResponsesRequest))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("Hello.", "person"),
        ([{"role": "user", "content": "Hello."}], "person"),
        ([CALL, OUTPUT], "tool"),
        ([CALL, CUSTOM_OUTPUT], "tool"),
        ([CALL, OUTPUT, {"role": "user", "content": "Hello."}], "person"),
    ],
)
def test_the_last_item_of_a_response_tells_a_tools_turn(given: Any, kind: str) -> None:
    assert response(input=given) == CacheHints(turn_kind=kind)


def test_a_response_takes_the_hints_of_a_chat() -> None:
    hints = response(
        session_id="s", cache_ttl_seconds=60, nvext={"agent_hints": {"priority": -2, "osl": 9}}
    )
    assert hints == CacheHints(
        session="s", turn_kind="person", priority=-2, keep_seconds=60, expected_tokens=9
    )


def test_a_stored_conversation_is_a_session_unless_the_body_names_one() -> None:
    assert response(conversation="conv_1").session == "conv_1"
    assert response(conversation={"id": "conv_1"}).session == "conv_1"
    assert response(conversation="conv_1", session_id="s").session == "s"


def test_a_session_and_a_time_are_taken_over() -> None:
    hints = chat(session_id="s", cache_ttl_seconds=60)
    assert (hints.session, hints.keep_seconds) == ("s", 60)


@pytest.mark.parametrize(("given", "expected"), [(5, 5), (-5, -5), (1000, 8), (-1000, -8)])
def test_a_higher_priority_of_dynamos_hints_keeps_blocks_longer(given: int, expected: int) -> None:
    hints = chat(nvext={"agent_hints": {"priority": given, "osl": 300}})
    assert (hints.priority, hints.expected_tokens) == (expected, 300)


def test_the_priority_of_the_queue_is_none_of_the_cache() -> None:
    assert chat(priority=7).priority == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_ttl_seconds": 86_401}, "cache_ttl_seconds"),
        ({"session_id": "s" * 257}, "session_id"),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "priority"),
        ({"nvext": {"agent_hints": {"osl": -1}}}, "osl"),
    ],
)
def test_a_hint_out_of_range_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chat(**fields)
