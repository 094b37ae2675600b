"""Calls of regular formats at random: whole or streamed, what comes out is what went in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import AnswerFormat, CustomInput, Tool
from headwater.services.answers.argument_types import tool_types, types_of, value_as_json
from headwater.services.answers.marked_formats import MARKED_FORMATS
from headwater.services.answers.parser import AnswerParser
from tests.services.answers.received_answer import ReceivedAnswer, cut, receive
from tests.services.answers.written_calls import BARE, WRITERS

TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "share": {"$ref": "#/$defs/share"},
    "list": {"type": "array"},
    "deep": {"type": "object"},
    "is_now": {"enum": [True, False]},
}
SCHEMA = {"properties": TYPES, "$defs": {"share": {"type": ["number", "null"]}}}
TOOLS = [Tool(name=name, parameters_json=json.dumps(SCHEMA)) for name in ("weather", "time")]
NAMES = [tool.name for tool in TOOLS]
# A text without quotes has no way to write the format's own marks.
texts = st.text(alphabet="ab <>/\"'\\{}5\né😀", max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {},
            optional={
                "text": texts,
                "maybe": texts.filter(lambda text: text.strip() != "null") | st.none(),
                "count": st.integers(),
                "share": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
                "list": st.lists(values, max_size=3),
                "deep": st.dictionaries(texts, values, max_size=3),
                "is_now": st.booleans(),
            },
        ),
    ),
    min_size=1,
    max_size=3,
)


def form_of(name: str, **more: Any) -> AnswerFormat:
    return AnswerFormat(
        tool_parser=name, tool_names=NAMES, tool_types=map(tool_types, TOOLS), **more
    )


@pytest.mark.parametrize("name", MARKED_FORMATS)
@settings(max_examples=8, deadline=None)
@given(
    asked=calls,
    before=st.sampled_from(["", "One moment.\n"]),
    places=st.lists(st.integers(0, 999), max_size=12),
)
def test_calls_come_out_as_they_went_in(
    name: str, asked: list[tuple[str, dict[str, Any]]], before: str, places: list[int]
) -> None:
    text = before + WRITERS[name](asked)
    for pieces in (cut(text, places), list(text), [text]):
        received = receive(form_of(name), pieces)
        assert received.calls == asked
        assert received.content == before.strip()


@pytest.mark.parametrize("name", MARKED_FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 999), max_size=6))
def test_what_is_read_of_any_text_does_not_depend_on_its_pieces(
    name: str, data: st.DataObject, places: list[int]
) -> None:
    marked = MARKED_FORMATS[name]
    pieces_of = st.sampled_from([*marked.markers, "weather", "text", "{}", "\n", "<", "a"])
    text = "".join(data.draw(st.lists(pieces_of | st.text(max_size=3), max_size=14)))
    form = form_of(name)
    reader, by_character = AnswerParser(form), AnswerParser(form)
    received, expected = ReceivedAnswer(), ReceivedAnswer()
    for piece in cut(text, places):
        received.take(reader.push(piece))
        for char in piece:
            expected.take(by_character.push(char))
        assert received == expected
    received.take(reader.flush())
    expected.take(by_character.flush())
    assert received == expected


@pytest.mark.parametrize("name", MARKED_FORMATS)
def test_a_string_is_streamed_while_it_is_written(name: str) -> None:
    text = WRITERS[name]([("weather", {"text": "Ulm and Bonn"})])
    received = receive(form_of(name), [text[: text.index(" and")]])
    assert received.arguments == ['{"text": "Ulm']


@pytest.mark.parametrize("name", MARKED_FORMATS)
def test_one_call_ends_the_answer_and_a_cut_one_is_open(name: str) -> None:
    call = ("weather", {"count": 1})
    text = WRITERS[name]([call, call])
    reader = AnswerParser(form_of(name, single_call=True))
    received = ReceivedAnswer()
    received.take(reader.push(text))
    assert (reader.is_over, received.calls) == (True, [call])
    cut_off = AnswerParser(form_of(name))
    cut_off.push(text[: text.index("count") + 2])
    assert cut_off.is_call_open


@pytest.mark.parametrize("name", MARKED_FORMATS)
def test_marks_without_a_call_are_content(name: str) -> None:
    for text in (f"See {MARKED_FORMATS[name].opening} here.", MARKED_FORMATS[name].opening[:-1]):
        for pieces in ([text], list(text)):
            received = receive(form_of(name), pieces)
            assert (received.content, received.names) == (text, [])


@pytest.mark.parametrize("name", sorted(BARE))
def test_the_text_of_a_custom_tool_stands_without_quotes(name: str) -> None:
    tool = Tool(name="code", custom_input=CustomInput())
    form = AnswerFormat(
        tool_parser=name, tool_names=["code"], custom_names=["code"], tool_types=[tool_types(tool)]
    )
    text = 'print("5")\n'
    received = receive(form, list(WRITERS[name]([("code", {"input": text})])))
    assert received.arguments == [text]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5", set(), "5"),
        ("5", {"number"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"),
        ("None", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("{'a': None}", {"object"}, '{"a": null}'),
        ('"x"', set(), r'"\"x\""'),
        ("NaN", {"number"}, '"NaN"'),
        ("[" * 9999, {"array"}, json.dumps("[" * 9999)),
    ],
)
def test_the_schema_decides_what_a_value_without_quotes_is(
    text: str, types: set[str], expected: str
) -> None:
    assert value_as_json(text, frozenset(types)) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "elsewhere"}, set()),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": None}, {"null"}),
        ({"oneOf": [{"type": "array"}, {}]}, set()),
        ({"allOf": [{}, {"type": "object"}]}, {"object"}),
        (True, set()),
    ],
)
def test_types_are_found_behind_references_and_alternatives(schema: Any, types: set[str]) -> None:
    whole = {"$defs": {"a": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(schema, whole) == types
