"""What libraries of clients write into schemas: rewritten patterns match the same texts, and the
rest is served."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.client_spellings import ANNOTATION_FORMATS, SAME_PATTERNS
from headwater.services.grammars.grammars import Grammars, grammars_of
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import TextModel

EMAIL, DECIMAL = SAME_PATTERNS


@pytest.mark.parametrize("pattern", SAME_PATTERNS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_rewritten_pattern_matches_the_same_texts(pattern: str, data: st.DataObject) -> None:
    alphabet = {EMAIL: "a0.'-+_@", DECIMAL: "07.+-"}[pattern]
    end = {EMAIL: st.sampled_from(["", "@a.bc", "@a-b.c.de"]), DECIMAL: st.just("")}[pattern]
    text = data.draw(st.text(alphabet=alphabet, max_size=8)) + data.draw(end)
    same = SAME_PATTERNS[pattern]
    assert bool(re.search(same, text, re.ASCII)) == bool(re.search(pattern, text, re.ASCII))


@pytest.fixture(scope="module")
def grammars(demo_model: TextModel) -> Grammars:
    return grammars_of(demo_model.folder)


def accepts(grammars: Grammars, model: TextModel, schema: Any, value: Any) -> bool:
    asked = StructuredOutput(json_schema=json.dumps(schema))
    grammar = grammar_of(asked, {}, closes_schemas=True, missing_bytes=frozenset())
    matcher = grammars.compile(grammar)
    ids = model.tokenizer.encode(json.dumps(value), add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": EMAIL, "format": "email"}, "a.b@c.de", "a..b@c.de"),
        (
            {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
            "-0.50",
            "-.",
        ),
        *(({"type": "string", "format": name}, "any", 5) for name in sorted(ANNOTATION_FORMATS)),
        ({"type": "integer", "format": "int64"}, 5, "5"),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "integer"},
            },
            {"a": 1, "b": 2},
            {"c": 1},
        ),
        (
            {"type": "object", "propertyNames": {"const": "a"}},
            {"a": "any"},
            {"b": "any"},
        ),
        (
            # pydantic's union with a discriminator whose constants have defaults.
            {
                "$defs": {
                    kind: {
                        "type": "object",
                        "properties": {
                            "kind": {"const": kind, "default": kind, "type": "string"},
                            "name": {"type": "string"},
                        },
                        "required": ["name"],
                    }
                    for kind in ("cat", "dog")
                },
                "discriminator": {"propertyName": "kind", "mapping": {}},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            },
            {"kind": "dog", "name": "a"},
            {"name": "a"},
        ),
        (
            # pydantic's `set[Literal["a", "b"]]`.
            {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
            ["b", "a"],
            ["a", "a"],
        ),
        (
            {
                "$defs": {"Day": {"enum": [1, 2, 3], "title": "Day", "type": "integer"}},
                "type": "array",
                "items": {"$ref": "#/$defs/Day"},
                "minItems": 2,
                "uniqueItems": True,
            },
            [3, 1],
            [3],
        ),
        (
            {"type": "array", "items": {"type": "string"}, "maxItems": 1, "uniqueItems": True},
            ["any"],
            ["any", "other"],
        ),
    ],
    ids=str,
)
def test_what_libraries_write_is_enforced(
    grammars: Grammars, demo_model: TextModel, schema: Any, good: Any, bad: Any
) -> None:
    assert accepts(grammars, demo_model, schema, good)
    assert not accepts(grammars, demo_model, schema, bad)


@pytest.mark.parametrize(
    "more",
    [
        {"items": {"type": "string"}},
        {"items": {"enum": ["a", "b", "c", "d", "e", "f"]}},
        {"items": {"enum": [1, 1.0]}},
        {"items": {"enum": ["a", "b"]}, "contains": {"const": "a"}},
    ],
    ids=str,
)
def test_arrays_that_are_too_many_to_list_are_refused_by_their_keyword(more: Any) -> None:
    schema = {"type": "array", "uniqueItems": True} | more
    asked = StructuredOutput(json_schema=json.dumps(schema))
    with pytest.raises(BadRequest, match="'uniqueItems'"):
        grammar_of(asked, {}, closes_schemas=True, missing_bytes=frozenset())


def test_names_that_no_list_has_are_refused_by_their_keyword() -> None:
    asked = StructuredOutput(json_schema='{"propertyNames": {"pattern": "^a"}}')
    with pytest.raises(BadRequest, match="'propertyNames'"):
        grammar_of(asked, {}, closes_schemas=True, missing_bytes=frozenset())
