"""Schemas that require themselves within themselves: nothing finite matches them."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.endless import endless
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.errors import BadRequest
from tests.services.grammars.walks import Walker

SELF = {"$ref": "#"}
CLOSED = {"type": "object", "additionalProperties": False}
INNER = {"$ref": "#/$defs/x"}
ENDLESS: dict[str, dict[str, Any]] = {
    "a property": CLOSED | {"properties": {"a": SELF}, "required": ["a"]},
    "an item": {"type": "array", "items": SELF, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [SELF], "items": False, "minItems": 1},
    "a first item of older drafts": {"type": "array", "items": [SELF], "minItems": 1},
    "an item behind the first ones": {
        "type": "array",
        "prefixItems": [True],
        "items": SELF,
        "minItems": 2,
    },
    "definitions": INNER | {"$defs": {"x": CLOSED | {"properties": {"a": INNER}, "required": ["a"]}}},
    "definitions in turn": {
        "$ref": "#/$defs/x",
        "$defs": {
            "x": {"type": "array", "items": {"$ref": "#/$defs/y"}, "minItems": 1},
            "y": CLOSED | {"properties": {"a": INNER}, "required": ["a"]},
        },
    },
    "either of two": {
        "anyOf": [
            {"type": "array", "items": SELF, "minItems": 1},
            CLOSED | {"properties": {"a": SELF}, "required": ["a"]},
        ]
    },
    "either, and what nothing matches": {
        "anyOf": [
            {"type": "array", "items": SELF, "minItems": 1},
            {"type": "string", "minLength": 2, "maxLength": 1},
            False,
        ]
    },
    "members together": {
        "allOf": [{"type": "object", "properties": {"a": SELF}}, {"required": ["a"]}]
    },
    "a reference beside keywords": CLOSED
    | {"properties": {"a": {"$ref": "#", "description": "again"}}, "required": ["a"]},
    "any property": {"type": "object", "additionalProperties": SELF, "minProperties": 1},
    "a required property without a name of its own": {
        "type": "object",
        "additionalProperties": SELF,
        "required": ["a"],
    },
    "a property by its pattern": {
        "type": "object",
        "patternProperties": {"^a": SELF},
        "required": ["ab"],
    },
    "a reference to itself": SELF,
    "a member that is the whole": {"allOf": [SELF]},
}  # fmt: skip
FINITE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an optional property": (
        CLOSED | {"properties": {"a": SELF}},
        ["{}", '{"a":{}}', '{"a":{"a":{}}}'],
    ),
    "a list that may be empty": ({"type": "array", "items": SELF}, ["[]", "[[],[[]]]"]),
    "either itself or null": (
        CLOSED | {"properties": {"a": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["a"]},
        ['{"a":null}', '{"a":{"a":null}}'],
    ),
    "by types": (
        {"type": ["array", "null"], "items": SELF, "minItems": 1},
        ["null", "[null]", "[[null],null]"],
    ),
    "a constant beside it": (
        {"type": "array", "items": {"anyOf": [{"const": 1}, SELF]}, "minItems": 1, "maxItems": 1},
        ["[1]", "[[1]]"],
    ),
    "a member that is the whole, and another": ({"anyOf": [SELF, {"type": "null"}]}, ["null"]),
}
PRUNED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "an optional property": (
        CLOSED | {"properties": {"n": {"type": "null"}, "x": INNER}},
        ["{}", '{"n":null}'],
        ['{"x', '{"n":null,'],
    ),
    "items": ({"type": "array", "items": INNER}, ["[]"], ["[["]),
    "a member": ({"anyOf": [INNER, {"type": "null"}]}, ["null"], ["["]),
    "other properties": (
        {"type": "object", "properties": {"n": {"type": "null"}}, "additionalProperties": INNER},
        ["{}", '{"n":null}'],
        ['{"n":null,', '{"a'],
    ),
}
X = {"$defs": {"x": {"type": "array", "items": INNER, "minItems": 1}}}


def grammar_of_schema(schema: dict[str, Any]) -> str:
    asked = StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern="")
    return grammar_of(asked, {})


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_that_nothing_finite_matches_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="nothing that ends matches it") as refused:
        grammar_of_schema(schema)
    assert refused.value.param == "structured_output.json_schema"
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(("schema", "texts"), FINITE.values(), ids=FINITE)
def test_recursion_with_an_end_is_taken(
    schema: dict[str, Any], texts: list[str], walker: Walker
) -> None:
    grammar = grammar_of_schema(schema)
    assert [text for text in texts if not walker.takes(grammar, text)] == []
    assert None not in walker.answers(grammar, 5)


@pytest.mark.parametrize(("schema", "texts", "beginnings"), PRUNED.values(), ids=PRUNED)
def test_an_answer_does_not_begin_what_has_no_end(
    schema: dict[str, Any], texts: list[str], beginnings: list[str], walker: Walker
) -> None:
    grammar = grammar_of_schema(schema | X)
    assert [text for text in texts if not walker.takes(grammar, text)] == []
    assert [text for text in beginnings if walker.begins(grammar, text)] == []


def test_a_search_that_grows_without_bounds_ends_soon() -> None:
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}, {"properties": {"a": SELF}}]}
    schema = {"type": "object", "allOf": [either] * 60}
    schema = json.loads(json.dumps(schema))
    began = time.thread_time()
    assert endless(schema) == frozenset()
    assert time.thread_time() - began < 0.5


def test_a_long_chain_of_references_takes_linear_time() -> None:
    names = [f"d{i}" for i in range(3_000)]
    random.Random(1).shuffle(names)
    definitions: dict[str, Any] = {
        name: {"type": "array", "items": {"$ref": f"#/$defs/{following}"}, "minItems": 1}
        for name, following in zip(names, [*names[1:], names[0]], strict=True)
    }
    schema = {"$ref": f"#/$defs/{names[0]}", "$defs": definitions}
    began = time.thread_time()
    assert id(schema) in endless(schema)
    definitions[names[-1]] = {"type": "null"}
    assert endless(schema) == frozenset()
    assert time.thread_time() - began < 1.5
