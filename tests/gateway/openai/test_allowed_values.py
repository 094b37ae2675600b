"""Sentences of what a field may be, where its type alone says it."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from headwater.gateway.admin.replicas import Role
from headwater.gateway.openai.batch_schema import NewBatch
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.schema import ChatCompletionRequest, ResponseFormat
from headwater.gateway.openai.structured_output import format_to_pb
from headwater.gateway.openai.to_pb import conversation_to_pb
from headwater.gateway.wire.body import Body
from headwater.services.runtime.errors import BadRequest

EMPTY_FORMAT = b'{"type": "json_schema", "json_schema": {"name": "a"}}'
IDS = b'{"input_file_id": "file-x"'


class Mixed(Body, kw_only=True):
    either: int | str
    nested: dict[str, int]


@pytest.mark.parametrize(
    ("body", "kind", "reported"),
    [
        (b'{"role": "x"}', Role, "role is 'x'; allowed: both, prefill, decode"),
        (b"{}", Role, "role is missing; allowed: both, prefill, decode"),
        (IDS + b"}", NewBatch, "endpoint is missing; allowed: a string"),
        (b'{"nested": {}}', Mixed, "either is missing; allowed: a whole number or a string"),
        (b'{"either": 1}', Mixed, "nested is missing; allowed: an object"),
        (b"", Mixed, "the body is not valid JSON: it is empty"),
        (
            b'{"a": "b", "c": "d\xff"}',
            Mixed,
            "the body is not valid JSON: it is not UTF-8 (byte 18)",
        ),
        (IDS + b', "endpoint": 5}', NewBatch, "endpoint is 5; allowed: a string"),
        (
            b'{"model": "m", "messages": "hi"}',
            ChatCompletionRequest,
            "messages is 'hi'; allowed: a list of at least one message, at most 16384",
        ),
        (
            IDS + b', "endpoint": "x", "metadata": {"a": 1}}',
            NewBatch,
            "metadata is {'a': 1}; allowed: up to 16 strings by name",
        ),
    ],
)
def test_an_error_says_what_the_type_allows(body: bytes, kind: type[Body], reported: str) -> None:
    with pytest.raises(BadRequest) as raised:
        decode(body, kind)
    assert str(raised.value) == reported


@pytest.mark.parametrize(
    "form", [ResponseFormat(type="json_schema"), decode(EMPTY_FORMAT, ResponseFormat)]
)
def test_a_format_without_a_schema_names_the_field_that_it_belongs_in(form: ResponseFormat) -> None:
    with pytest.raises(BadRequest) as raised:
        format_to_pb(form, "response_format")
    assert (
        str(raised.value) == "response_format.json_schema.schema is missing; allowed: a JSON Schema"
    )


def test_a_long_body_that_is_no_json_is_not_read_again() -> None:
    """As text it would take four times its memory, for one character of four bytes."""
    body = b'{,"' + "\N{GRINNING FACE}".encode() + b"a" * (1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="not valid JSON: JSON is malformed"):
            decode(body, ChatCompletionRequest)
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_tool_in_the_form_of_another_endpoint_is_told_where_its_name_belongs(kind: str) -> None:
    """Responses have the fields of a function beside its type, chat in an object."""
    body = {"model": "m", "messages": [], "tools": [{"type": kind, "name": "f"}]}
    asked = decode(json.dumps(body).encode(), ChatCompletionRequest)
    with pytest.raises(BadRequest) as raised:
        conversation_to_pb(asked)
    assert str(raised.value) == f"tools[0].{kind} is missing; allowed: an object with a name"


@pytest.mark.parametrize(("kind", "field"), [("text", "text"), ("refusal", "refusal")])
def test_a_part_without_its_text_is_refused_with_its_place(kind: str, field: str) -> None:
    parts = [{"type": "text", "text": ""}, {"type": kind, "content": "x"}]
    messages = [{"role": "system", "content": "x"}, {"role": "assistant", "content": parts}]
    asked = decode(json.dumps({"model": "m", "messages": messages}).encode(), ChatCompletionRequest)
    with pytest.raises(BadRequest) as raised:
        conversation_to_pb(asked)
    assert str(raised.value) == f"messages[1].content[1].{field} is missing; allowed: a string"
