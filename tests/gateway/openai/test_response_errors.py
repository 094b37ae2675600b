"""Errors of responses and conversations name what the client sent, where it sent it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.processes import MODEL, Gateway

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Hi"}
ODD = {"role": "zz", "content": "x"}
ROLES = "system, developer, user, assistant, tool"


def refused(gateway: Gateway, path: str = RESPONSES, /, **body: Any) -> tuple[str, str]:
    """Field and message of the error."""
    reply = gateway.client.post(
        path, json={"model": MODEL} | body if path.startswith(RESPONSES) else body
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"input": [USER, ODD], "instructions": "Be brief."},
        f"input[1].role is 'zz'; allowed: {ROLES}",
    ),
    ({"input": [USER, {"content": "x"}]}, f"input[1].role is missing; allowed: {ROLES}"),
    (
        {"input": [USER, {"type": "reasoning", "summary": [{"type": "picture"}]}]},
        "input[1].summary[0].type is 'picture'; allowed: input_text or output_text",
    ),
    (
        {"input": [{"role": "user", "content": None}]},
        "input[0].content is missing; allowed: a string or a list of text parts",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "content": "x"}]}]},
        "input[0].content[0].text is missing; allowed: a string",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c"}]},
        "input[0].name is missing; allowed: the name of a tool",
    ),
    (
        {"input": [{"type": "function_call_output"}]},
        "input[0].call_id is missing; allowed: the id of a call",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c"}]},
        "input[0].output is missing; allowed: a string or a list of text parts",
    ),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "trip"}}},
        "text.format.schema is missing; allowed: a JSON Schema, with type json_schema",
    ),
    (
        {"input": "x", "response_format": {"type": "json_object"}},
        "response_format is not supported: here it is `text.format`",
    ),
    (
        {"input": "x", "max_completion_tokens": 5},
        "max_completion_tokens is not supported: here it is `max_output_tokens`",
    ),
    (
        {"input": "x", "guided_regex": "a+"},
        "guided_regex is not supported: here it is `structured_outputs.regex`",
    ),
    (
        {"input": "x", "echo": True},
        "echo is not supported: it is a field of /v1/chat/completions",
    ),
    (
        {"input": "x", "min_tokens": 50, "max_output_tokens": 12},
        "min_tokens is 50; allowed: 0…12 (max_output_tokens)",
    ),
]


@pytest.mark.parametrize(("body", "message"), MESSAGES, ids=[message for _, message in MESSAGES])
def test_a_message_names_the_fields_that_were_sent(
    gateway: Gateway, body: dict[str, Any], message: str
) -> None:
    for way in ({}, {"stream": True}):
        assert refused(gateway, **body | way) == (message.partition(" ")[0], message)


def test_a_prompt_that_is_too_long_is_compared_with_the_limit_that_was_sent(
    gateway: Gateway,
) -> None:
    param, message = refused(gateway, input="Hi", max_output_tokens=8190)
    assert (param, "tokens and max_output_tokens 8190; allowed: 8192" in message) == (
        "input",
        True,
    ), message


def test_a_limit_under_its_other_name_is_named_as_it_was_sent(gateway: Gateway) -> None:
    assert refused(gateway, input="Hi", max_tokens=0)[0] == "max_tokens"
    assert refused(gateway, input="Hi", min_tokens=50, max_tokens=12)[1].endswith("(max_tokens)")
    assert refused(gateway, input="Hi", max_tokens=5, max_output_tokens=0)[0] == "max_output_tokens"


def test_a_chat_names_its_own_limit_and_all_of_its_roles(gateway: Gateway) -> None:
    chat = {"model": MODEL, "messages": [USER], "max_completion_tokens": 12}
    _, message = refused(gateway, "/v1/chat/completions", **chat, min_tokens=50)
    assert message == "min_tokens is 50; allowed: 0…12 (max_completion_tokens)"
    param, message = refused(gateway, "/v1/chat/completions", **chat | {"messages": [USER, ODD]})
    assert (param, message) == (
        "messages[1].role",
        f"messages[1].role is 'zz'; allowed: {ROLES}, function",
    )


def test_the_tokens_of_a_turn_are_counted_under_the_same_names(gateway: Gateway) -> None:
    assert (
        refused(gateway, f"{RESPONSES}/input_tokens", input=[USER, ODD], instructions="x")[0]
        == "input[1].role"
    )
