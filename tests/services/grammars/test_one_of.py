"""Which members of a oneOf are told apart, and what its grammar accepts then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.grammars import GrammarError, Grammars, grammars_of
from headwater.services.grammars.json_schema import check_schema
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel

Schema = dict[str, Any]


def version(number: object, **more: object) -> Schema:
    return {"type": "object", "properties": {"v": {"const": number}}, "required": ["v"]} | more


def one_of(*members: object, **more: object) -> Schema:
    return {"oneOf": list(members)} | more


TOLD_APART: dict[str, tuple[Schema, list[str]]] = {
    "numbers": (one_of({"const": 1}, {"const": 2}), ["1", "2", "3"]),
    "enums of numbers": (
        one_of({"enum": [1, 3]}, {"enum": [2, -4.5]}),
        ["1", "3", "2", "-4.5", "4"],
    ),
    "numbers with titles": (
        one_of({"const": 1, "title": "low"}, {"const": 2, "title": "high"}),
        ["1", "2"],
    ),
    "numbers of a type": (one_of({"const": 1}, {"const": 2}, type="integer"), ["1", "2", "3"]),
    "numbers, null and text": (
        one_of({"const": 1}, {"const": 2}, {"type": ["null", "string"]}),
        ["1", "null", '"a"'],
    ),
    "a number and a truth value": (
        one_of({"enum": [1, "a"]}, {"enum": [True, "b"]}),
        ["1", "true", '"a"', "false"],
    ),
    "lists and objects": (
        one_of({"const": [1]}, {"const": [2]}, {"const": {"a": 1}}),
        ["[1]", "[2]", '{"a":1}', "[3]"],
    ),
    "versions": (one_of(version(1), version(2)), ['{"v":1}', '{"v":2}', '{"v":3}', "{}"]),
    "versions, or null": (
        one_of(version(1), version(2), {"type": "null"}),
        ['{"v":2}', "null", '{"v":3}'],
    ),
    "versions of an object": (
        one_of(
            {"properties": {"v": {"const": 1}}},
            {"properties": {"v": {"const": 2}}},
            type="object",
            required=["v"],
        ),
        ['{"v":1}', '{"v":3}', "{}"],
    ),
    "references": (
        one_of(
            {"$ref": "#/$defs/a"},
            {"$ref": "#/$defs/b"},
            **{"$defs": {"a": {"const": 1}, "b": {"const": 2}}},
        ),
        ["1", "2", "3"],
    ),
    "references to references, in a property": (
        {
            "properties": {
                "x": one_of({"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b/prefixItems/0"}]})
            },
            "required": ["x"],
            "type": "object",
            "$defs": {
                "a": {"$ref": "#/$defs/c"},
                "c": version(1),
                "b": {"prefixItems": [version(2) | {"properties": {"v": {"$ref": "#/$defs/two"}}}]},
                "two": {"const": 2},
            },
        },
        ['{"x":{"v":1}}', '{"x":{"v":2}}', '{"x":{"v":3}}'],
    ),
    "beside an anyOf": (
        one_of({"const": 1}, {"const": 2}, anyOf=[{"const": 2}, {"const": 3}]),
        ["1", "2", "3"],
    ),
    "in a list": (
        {"type": "array", "items": one_of({"const": 1}, {"const": 2})},
        ["[1,2,1]", "[3]"],
    ),
}
NOT_TOLD_APART: dict[str, Schema] = {
    "1 and 1.0": one_of({"const": 1}, {"const": 1.0}),
    "1 and 1.0 within": one_of({"const": [{"a": 1}]}, {"const": [{"a": 1.0}]}),
    "enums that share a number": one_of({"enum": [1, 2]}, {"enum": [2, 3]}),
    "a number and any number": one_of({"const": 1}, {"type": "integer"}),
    "the same twice": one_of(
        {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, **{"$defs": {"a": {"const": 1}}}
    ),
    "a property that one may leave out": one_of(version(1), version(2, required=[])),
    "what need not be an object": one_of(
        *({"properties": {"v": {"const": n}}, "required": ["v"]} for n in (1, 2))
    ),
    "ranges": one_of({"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 2}),
    "a reference to itself": one_of({"$ref": "#"}, {"const": 1}),
}


@pytest.fixture(scope="module")
def grammars(demo_folder: Path) -> Grammars:
    return grammars_of(demo_folder)


def is_valid(text: str, schema: Schema) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("case", TOLD_APART)
def test_members_that_differ_by_constants_are_taken(
    case: str, grammars: Grammars, demo_model: TextModel
) -> None:
    schema, texts = TOLD_APART[case]
    start = grammars.compile(grammar_of(StructuredOutput(json_schema=json.dumps(schema)), {}))
    assert any(is_valid(text, schema) for text in texts)
    for text in texts:
        matcher = start.deep_copy()
        token_ids = demo_model.tokenizer.encode(text, add_special_tokens=False)
        is_taken = (
            matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        )
        assert is_taken == is_valid(text, schema), text


@pytest.mark.parametrize("case", NOT_TOLD_APART)
def test_members_that_nothing_distinguishes_are_refused(case: str, grammars: Grammars) -> None:
    grammar = grammar_of(StructuredOutput(json_schema=json.dumps(NOT_TOLD_APART[case])), {})
    with pytest.raises(GrammarError, match="not told apart"):
        grammars.compile(grammar)


def test_references_below_an_id_are_not_read_as_those_of_the_whole() -> None:
    inner = one_of({"$ref": "#/$defs/a"}, {"const": 2}) | {
        "$id": "http://localhost/x",
        "$defs": {"a": {"const": 2}},
    }
    schema: Schema = {"properties": {"x": inner}, "$defs": {"a": {"const": 1}}}
    check_schema("p", schema)
    assert "oneOf" in schema["properties"]["x"]


ENUM = {
    "$defs": {"all": {"enum": [*range(20_000)]}, "half": {"enum": [i + 0.5 for i in range(10_000)]}}
}
PAIR = one_of({"$ref": "#/$defs/all"}, {"$ref": "#/$defs/half"})
COSTLY: dict[str, Schema] = {
    "large enums, named by many": ENUM | {"prefixItems": [PAIR] * 1000},
    "a long chain of references": one_of(
        *[{"$ref": "#/$defs/0"}] * 3000,
        **{"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}},
    ),
    "places of a long list": one_of(
        *[{"$ref": "#/$defs/all/19999"}] * 5000, **{"$defs": {"all": [{}] * 20_000}}
    ),
}


@pytest.mark.parametrize("case", COSTLY)
def test_members_that_cost_too_much_to_distinguish_stay_as_they_are(case: str) -> None:
    schema = json.loads(json.dumps(COSTLY[case]))
    began = time.thread_time()
    check_schema("p", schema)
    assert time.thread_time() - began < 2
    assert '"oneOf"' in json.dumps(schema)
