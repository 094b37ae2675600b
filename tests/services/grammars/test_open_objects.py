"""Objects with other names than the declared ones: a declared name comes once, under its own
schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.prepared_schema import prepared
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.errors import BadRequest
from tests.services.grammars.walks import Walker

OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"const": 1}, "é": {"const": 2}, "x\n": {"const": 3}},
    "additionalProperties": {"type": "integer"},
}
IN_PART: dict[str, Any] = {
    "allOf": [
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}},
        {"properties": {"é": {"const": 2}, "x\n": {"const": 3}}, "additionalProperties": True},
    ]
}


def grammar_of_schema(schema: dict[str, Any]) -> str:
    return grammar_of(StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern=""), {})


@pytest.mark.parametrize("schema", [OPEN, IN_PART], ids=["alone", "in part"])
def test_a_declared_name_has_no_other_spelling(schema: dict[str, Any], walker: Walker) -> None:
    grammar = grammar_of_schema(schema)
    for text in ['{"a":1,"é":2,"x\\n":3,"other":7}', '{"b":2,"c":5}', "{}"]:
        assert walker.takes(grammar, text), text
    for text in [
        '{"a":1,"\\u0061":5}',
        '{"\\u0061":5}',
        '{"\\u00e9":5}',
        '{"a":1,"\\u00E9":2}',
        '{"x\\u000a":5}',
        '{"x\\u000A":3}',
        '{"a":1,"a":1}',
        '{"c":5,"a":1}',
    ]:
        assert not walker.takes(grammar, text), text


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
    data=st.data(),
)
def test_no_spelling_brings_a_name_again(
    names: list[str], data: st.DataObject, walker: Walker
) -> None:
    schema = {"type": "object", "properties": {name: {"const": 1} for name in names}}
    grammar = grammar_of_schema(schema | {"additionalProperties": True})
    written = [f"{json.dumps(name, ensure_ascii=False)}:1" for name in names]
    again = "".join(
        data.draw(st.sampled_from([char, json.dumps(char)[1:-1], f"\\u{ord(char):04x}"]))
        for char in data.draw(st.sampled_from(names))
        if ord(char) < 0x10000
    )
    text = f'{{{",".join(written)},"{again}":5}}'
    try:
        is_again = len(json.loads(text, strict=False)) == len(names)
    except ValueError:
        return
    assume(is_again)
    assert not walker.takes(grammar, text)


def test_a_declared_name_out_of_order_goes_on_as_a_word_only(walker: Walker) -> None:
    grammar = grammar_of_schema(OPEN)
    for text in ['{"a":1,"ab":5}', '{"a":1,"a_1":5}', '{"a":1,"aé":5}', '{"a":1,"b":5,"a.c":2}']:
        assert walker.takes(grammar, text), text
    for beginning in ['{"a":1,"a\\', '{"a":1,"a ', '{"a":1,"a:', '{"é":2,"a\\"']:
        assert not walker.begins(grammar, beginning), beginning


def test_a_declared_name_may_go_on_as_another_one(walker: Walker) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "a b": {"const": 2}, "a\nb": {"const": 3}},
        "additionalProperties": True,
    }
    assert walker.takes(grammar_of_schema(schema), '{"a":1,"a b":2,"a\\nb":3,"c":4}')


def test_a_control_character_in_a_constant_is_refused_beside_other_names() -> None:
    constant = {"type": "object", "properties": {"a": {"enum": ["x", ["\x01"]]}}}
    with pytest.raises(BadRequest, match="a control character in a constant at /properties/a"):
        grammar_of_schema(constant)
    assert grammar_of_schema(constant | {"additionalProperties": False})


NAMED = {
    "one name": (
        {"properties": {"a": {"const": 1}}, "patternProperties": {"^a$": {"type": "integer"}}},
        {"properties": {"a": {"allOf": [{"const": 1}, {"type": "integer"}]}}},
    ),
    "a required name": (
        {"required": ["a"], "patternProperties": {"^(a|b)?$": {"const": 1}, "^x": True}},
        {"required": ["a"], "patternProperties": {"^(a|b)?$": {"const": 1}, "^x": True}},
    ),
    "all names of a pattern": (
        {
            "properties": {"b": True},
            "required": ["a", "", "b"],
            "patternProperties": {"^[ab]?$": {"const": 1}},
        },
        {
            "properties": {"b": {"const": 1}, "a": {"const": 1}, "": {"const": 1}},
            "required": ["a", "", "b"],
        },
    ),
    "where a reference goes": (
        {
            "properties": {"a": {"const": 1}},
            "patternProperties": {"^a$": {"type": "integer"}},
            "$defs": {"d": {"$ref": "#/patternProperties/^a$"}},
        },
        None,
    ),
}


@pytest.mark.parametrize(("schema", "expected"), NAMED.values(), ids=NAMED)
def test_a_pattern_of_declared_names_joins_their_schemas(
    schema: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    closed = schema | {"type": "object", "additionalProperties": False}
    ready = prepared("p", closed)
    del ready["x-guidance"]
    wanted = closed if expected is None else {"patternProperties": {}} | expected
    assert ready == wanted | {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("pattern", ["^a$", "^a{1}$", "^(?:a)$", r"^\x61$", "^[a]$", "^(a|a)$"])
def test_a_pattern_of_declared_names_leaves_no_dead_end(pattern: str, walker: Walker) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
        "patternProperties": {pattern: {"type": "integer"}},
    }
    grammar = grammar_of_schema(schema)
    assert walker.answers(grammar, 8) == {'{"a":1}'}
    jsonschema.validate({"a": 1}, schema)
