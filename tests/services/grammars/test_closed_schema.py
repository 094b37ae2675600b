"""Objects have no properties but those that their schema names, unless it opens them or describes
them in parts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.closed_schema import closed
from headwater.services.grammars.grammars import fill, grammars_of
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel
from tests.services.grammars.structured_schemas import random_schemas, written

INT: Any = {"type": "integer"}
A: Any = {"type": "object", "properties": {"a": INT}}
B: Any = {"type": "object", "properties": {"b": INT}}
NO_MORE: Any = {"additionalProperties": False}
OPEN: dict[str, Any] = {
    "it says so": A | {"additionalProperties": True},
    "it says what else there is": A | {"additionalProperties": INT},
    "patterns name others": A | {"patternProperties": {"^x": INT}},
    "it names none": {"type": "object"},
    "it requires one that it does not name": A | {"required": ["a", "z"]},
    "it wants more than it names": A | {"minProperties": 2},
    "members of allOf share the object": {"allOf": [A, B]},
    "alternatives stand beside properties": A | {"anyOf": [B, {"required": ["a"]}]},
    "a reference stands beside properties": A | {"$ref": "#/$defs/b", "$defs": {"b": B}},
    "a reference is shared by members of allOf": {
        "$defs": {"a": A},
        "allOf": [{"$ref": "#/$defs/a"}, B],
    },
    "what two members describe": {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
    "a property that matches a pattern too": {
        "properties": {"x": A},
        "patternProperties": {"x": B},
    },
    "a reference by an anchor": {
        "$defs": {"a": {"$anchor": "here"} | A},
        "properties": {"x": {"$ref": "#here"}},
    },
}
CLOSED: dict[str, tuple[Any, Any]] = {
    "an object": (A, A | NO_MORE),
    "an object without a property": ({"properties": {}}, {"properties": {}} | NO_MORE),
    "objects in objects and lists": (
        {"properties": {"x": {"type": "array", "items": A, "prefixItems": [B]}}},
        {"properties": {"x": {"type": "array", "items": A | NO_MORE, "prefixItems": [B | NO_MORE]}}}
        | NO_MORE,
    ),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | NO_MORE, {"type": "null"}]}),
    "a single member of allOf": (
        {"allOf": [A], "title": "x"},
        {"allOf": [A | NO_MORE], "title": "x"},
    ),
    "what is referred to, also by itself": (
        {
            "$ref": "#/$defs/a~1b",
            "$defs": {"a/b": {"properties": {"next": {"$ref": "#/$defs/a~1b"}}}},
        },
        {
            "$ref": "#/$defs/a~1b",
            "$defs": {"a/b": {"properties": {"next": {"$ref": "#/$defs/a~1b"}}} | NO_MORE},
        },
    ),
    "values of other properties": (
        {"properties": {}, "additionalProperties": A},
        {"properties": {}, "additionalProperties": A | NO_MORE},
    ),
    "constants stay as they are": (
        {"properties": {"x": {"const": {"properties": {}}}}},
        {"properties": {"x": {"const": {"properties": {}}}}} | NO_MORE,
    ),
}


@pytest.mark.parametrize("schema", OPEN.values(), ids=OPEN)
def test_an_object_stays_open_where(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(("schema", "expected"), CLOSED.values(), ids=CLOSED)
def test_closed_is(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


def test_something_matches_every_closed_schema(demo_model: TextModel) -> None:
    grammars = grammars_of(demo_model.folder)
    mask = np.zeros(grammars.num_words, np.int32)
    for schema in [*written(), *map(opened, random_schemas(60, seed=5))]:
        asked = StructuredOutput(json_schema=json.dumps(schema), strict=True)
        # Raises where nothing matches.
        fill(grammars.compile(grammar_of(asked, {})), mask)


def opened(value: Any) -> Any:
    """A schema that says nothing of other properties."""
    if isinstance(value, list):
        return [opened(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: opened(each)
        for key, each in value.items()
        if (key, each) != ("additionalProperties", False)
    }


def test_strict_closes_what_the_deployment_leaves_open() -> None:
    for output in (
        {"json_schema": json.dumps(A)},
        {"structural_tag": json.dumps({"format": {"type": "json_schema", "json_schema": A}})},
    ):
        is_closed = {
            (strict, closes): '"additionalProperties": false'
            in grammar_of(
                StructuredOutput(**output, strict=strict), {}, closes_schemas=closes
            ).replace('\\"', '"')
            for strict in (None, False, True)
            for closes in (False, True)
        }
        assert [key for key, held in is_closed.items() if not held] == [
            (None, False),
            (False, False),
        ]
