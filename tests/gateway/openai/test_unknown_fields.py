"""Fields that nobody knows: accepted wherever they stand and named in the log once, if they change
no answer."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from headwater.gateway.long_work import LONG_BODY_BYTES
from headwater.gateway.openai.batch_schema import NewBatch
from headwater.gateway.openai.conversation_schema import NewConversation
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.embeddings import EmbeddingRequest
from headwater.gateway.openai.response_schema import ResponsesRequest
from headwater.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
)
from headwater.services.runtime.errors import BadRequest

PART = {"type": "text", "text": "Hi"}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [PART]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"any": {"thing": 1}}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"unheard-of": 1}}},
    "stream_options": {},
    "chat_template_kwargs": {"mine": 1},
    "temperature": 1,
}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "text": {"format": {"type": "text"}},
    "reasoning": {},
    "metadata": {"mine": "1"},
}
CONVERSATION = {"items": [{"role": "user", "content": "Hi"}], "metadata": {}}
ROWS: list[tuple[type[Any], dict[str, Any], str]] = [
    *((ChatCompletionRequest, CHAT, path) for path in ("", "messages[1]", "messages[1].content[0]", "tools[0].function")),
    *((ChatCompletionRequest, CHAT, path) for path in ("tool_choice.function", "response_format.json_schema")),
    (ChatCompletionRequest, CHAT, "stream_options"),
    (CompletionRequest, {"model": "m", "prompt": ["a", "b"], "response_format": {"type": "text"}}, "response_format"),
    *((ResponsesRequest, RESPONSE, path) for path in ("", "input[0]", "input[0].content[0]", "text.format", "reasoning")),
    (TokenizeRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]}, "messages[0]"),
    (EmbeddingRequest, {"model": "m", "input": [[1, 2], [3]]}, ""),
    (NewConversation, CONVERSATION, "items[0]"),
    (NewBatch, {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}, ""),
]  # fmt: skip


def at(body: Any, path: str) -> Any:
    for key in filter(None, path.replace("[", ".").replace("]", "").split(".")):
        body = body[int(key)] if key.isdigit() else body[key]
    return body


@pytest.mark.parametrize(
    ("kind", "good", "path"), ROWS, ids=[f"{row[0].__name__} {row[2]}" for row in ROWS]
)
def test_an_unknown_field_is_left_out_and_named_once(
    kind: type[Any], good: dict[str, Any], path: str
) -> None:
    name = f"foo{ROWS.index((kind, good, path))}"
    body = json.loads(json.dumps(good))
    at(body, path)[name] = {"deep": [1]}
    with capture_logs() as logs:
        made = [decode(json.dumps(body).encode(), kind) for _ in range(3)]
    assert made == [decode(json.dumps(good).encode(), kind)] * 3
    assert [(log["field"], log["request"]) for log in logs] == [
        (f"{path}.{name}".lstrip("."), kind.__name__)
    ]


def test_one_name_at_many_places_is_one_name() -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "a", "many": i} for i in range(20)]}
    with capture_logs() as logs:
        decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert [log["field"] for log in logs] == ["messages[0].many"]


def test_what_clients_send_back_of_an_answer_is_known() -> None:
    printed = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    output = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [output],
    }
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [],
        "encrypted_content": None,
    }
    with capture_logs() as logs:
        decode(
            json.dumps(CHAT | {"messages": [printed], "user": "u", "store": True}).encode(),
            ChatCompletionRequest,
        )
        decode(
            json.dumps(RESPONSE | {"input": [thought, message], "service_tier": "auto"}).encode(),
            ResponsesRequest,
        )
    assert logs == []


# Where, what, and a word of what is said to it.
REFUSED: list[tuple[type[Any], dict[str, Any], str, Any, str, str]] = [
    (ChatCompletionRequest, CHAT, "messages[1]", True, "prefix", "continue_final_message"),
    (ChatCompletionRequest, CHAT, "", {"model": "x"}, "moderation", "judges no texts"),
    (ResponsesRequest, RESPONSE, "", [{"type": "compaction"}], "context_management", "truncation"),
    (ChatCompletionRequest, CHAT | {"structured_outputs": {}}, "structured_outputs", 1, "magic", "regex, choice, grammar"),
    (ChatCompletionRequest, CHAT, "response_format", 5, "type", "structural_tag"),
    (ChatCompletionRequest, CHAT, "tools[0]", "web", "type", "function or custom"),
    (ChatCompletionRequest, CHAT, "tools[0].function", [], "parameters", "a JSON Schema of "
                                                                         "an object"),
    (ResponsesRequest, RESPONSE, "text.format", "xml", "type", "text, json_object or json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "good", "path", "value", "name", "words"),
    REFUSED,
    ids=[f"{row[2]}.{row[4]}" for row in REFUSED],
)
def test_what_would_change_the_answer_is_refused_with_its_place_and_what_is_allowed(
    kind: type[Any], good: dict[str, Any], path: str, value: Any, name: str, words: str
) -> None:
    body = json.loads(json.dumps(good))
    at(body, path)[name] = value
    with pytest.raises(BadRequest) as refused:
        decode(json.dumps(body).encode(), kind)
    assert refused.value.param == f"{path}.{name}".lstrip(".")
    assert words in refused.value.message


PROMPT = {"model": "m", "prompt": "a"}


@pytest.mark.parametrize(
    ("kind", "body", "field", "value", "reason"),
    [
        (ChatCompletionRequest, CHAT, "max_output_tokens", 5, "here it is `max_completion_tokens`"),
        (
            ChatCompletionRequest,
            CHAT,
            "text",
            {"format": {"type": "json_object"}},
            "here it is `response_format`",
        ),
        (
            ChatCompletionRequest,
            CHAT,
            "instructions",
            "Be brief.",
            "it is a field of /v1/responses",
        ),
        (
            ChatCompletionRequest,
            CHAT,
            "previous_response_id",
            "resp_1",
            "it is a field of /v1/responses",
        ),
        (ChatCompletionRequest, CHAT, "truncation", "auto", "it is a field of /v1/responses"),
        (ChatCompletionRequest, CHAT, "prompt", "a", "it is a field of /v1/completions"),
        (CompletionRequest, PROMPT, "max_output_tokens", 5, "here it is `max_tokens`"),
        (
            CompletionRequest,
            PROMPT,
            "tools",
            CHAT["tools"],
            "it is a field of /v1/chat/completions",
        ),
        (CompletionRequest, PROMPT, "background", True, "it is a field of /v1/responses"),
    ],
)
def test_a_field_of_another_endpoint_is_refused_with_its_name_here(
    kind: type[Any], body: dict[str, Any], field: str, value: Any, reason: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        decode(json.dumps(body | {field: value}).encode(), kind)
    assert str(raised.value) == f"{field} is not supported: {reason}"


def test_a_field_of_another_endpoint_that_asks_for_nothing_is_accepted() -> None:
    asked = {
        "background": False,
        "instructions": None,
        "truncation": "disabled",
        "include": [],
        "max_tool_calls": 3,
    }
    decode(json.dumps(CHAT | asked).encode(), ChatCompletionRequest)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 5000])
@pytest.mark.parametrize(
    ("field", "place"),
    [('"foo": {}', "foo"), ('"foo": 1, "metadata": {{"a": [0, {}]}}', "metadata.a[1]")],
)
def test_a_number_that_is_too_large_is_named_where_no_type_describes_it(
    field: str, place: str, number: str
) -> None:
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "a"}}], {field.format(number)}}}'
    shown = "-inf" if number.startswith("-") else "inf"
    with pytest.raises(BadRequest) as raised:
        decode(body.encode(), ChatCompletionRequest)
    assert (raised.value.param, raised.value.code) == (place, "invalid_value")
    assert (
        str(raised.value)
        == f"{place} is {shown}; allowed: numbers up to 1.8e+308, of at most 4300 digits"
    )


def test_digits_that_python_does_not_read_are_no_fault_of_the_json() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "seed": '
        + b"1" * 5000
        + b"}"
    )
    with pytest.raises(BadRequest, match="seed is inf; allowed: a whole number of 64 bits"):
        decode(body, ChatCompletionRequest)


def test_a_long_body_with_a_number_that_is_too_large_is_refused_without_its_place() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "foo": 1e999, "bar": "'
        + b"1" * LONG_BODY_BYTES
        + b'"}'
    )
    with pytest.raises(BadRequest, match="a number is too large; allowed: ") as raised:
        decode(body, ChatCompletionRequest)
    assert raised.value.param is None
