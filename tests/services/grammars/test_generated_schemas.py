"""Schemas that nobody wrote: each is refused before its answer begins, or every walk under its
masks comes to an end, and is valid."""

from __future__ import annotations

import datetime
import json
import random
import re
import string
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.grammars.subschemas import Schema
from headwater.services.runtime.errors import BadRequest
from tests.services.grammars.walks import Walker

FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6"])
SMALL = st.integers(0, 4)
BOUNDS = st.one_of(
    st.integers(-1000, 1000), st.integers(-8000, 8000).map(lambda eighths: eighths / 8)
)
NAMES = st.sampled_from(["a", "b", "ab", "name", "Größe", "x y", 'q"', "$ref", "0"])
PATTERNS = st.sampled_from(
    ["^a", "b$", "^[a-c]*$", r"^\d+$", "x", "^(ab|cd)e?$", "^.{1,3}$", r"^\S+$", "[é-ö]"]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-99, 99),
        st.text(string.printable + "é\u2028😀", max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


@FORMATS.checks("date", raises=ValueError)
def is_date(text: object) -> bool:
    """RFC 3339 has a year 0000, which is a leap year; the library's own check has none."""
    return not isinstance(text, str) or bool(
        datetime.date.fromisoformat(text.replace("0000-", "0004-", 1))
    )


def some_of(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries({}, optional=keywords)


def typed(name: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return some_of(**keywords).map(lambda given: {"type": name} | given)


LIMITS = {
    "minimum": BOUNDS,
    "maximum": BOUNDS,
    "exclusiveMinimum": BOUNDS,
    "exclusiveMaximum": BOUNDS,
}
LEAVES = st.one_of(
    typed("string", minLength=SMALL, maxLength=SMALL, pattern=PATTERNS),
    typed(
        "string",
        format=st.sampled_from(
            ["date", "date-time", "email", "ipv4", "ipv6", "uuid", "time", "duration"]
        ),
    ),
    typed("integer", multipleOf=st.sampled_from([1, 2, 3, 7, 10]), **LIMITS),
    typed("number", multipleOf=st.sampled_from([1, 2, 0.5, 0.25]), **LIMITS),
    typed("boolean"),
    typed("null"),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(st.sampled_from(["string", "integer", "null", "array"]), min_size=1, unique=True).map(
        lambda names: {"type": names}
    ),
)


def around(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    either = st.booleans() | inner
    members = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        typed("array", items=either, prefixItems=members, minItems=SMALL, maxItems=SMALL),
        typed(
            "object",
            properties=st.dictionaries(NAMES, inner, max_size=3),
            required=st.lists(NAMES, max_size=2, unique=True),
            additionalProperties=either,
            patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
            minProperties=SMALL,
            maxProperties=SMALL,
        ),
        some_of(anyOf=members),
        some_of(oneOf=members),
        some_of(allOf=members),
        st.tuples(inner, inner).map(lambda two: two[0] | {"anyOf": [two[1], {"type": "string"}]}),
    )


LINKS = st.sampled_from(["#", "#/$defs/d", "#/$defs/e"]).map(lambda link: {"$ref": link})
_LINKED = st.recursive(LEAVES | LINKS | LINKS, around, max_leaves=5)


def linked(parts: tuple[Schema, Schema, Schema]) -> Schema:
    """A schema whose parts refer to each other."""
    return {"$defs": {"d": parts[1], "e": parts[2]}} | parts[0]


def referred_to(schema: Schema) -> Schema:
    member = {"$ref": "#/$defs/d"}
    return {
        "$defs": {"d": schema},
        "type": "object",
        "properties": {"a": member, "b": {"items": member}},
    }


_TREES = st.recursive(LEAVES, around, max_leaves=6)
_LINKS = st.tuples(_LINKED, _LINKED, _LINKED).map(linked)
SCHEMAS = _TREES | _TREES | _TREES.map(referred_to) | _LINKS


def check(walker: Walker, schema: Schema, dice: random.Random) -> None:
    asked = StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern=" ?")
    try:
        grammar = grammar_of(asked, {})
    except BadRequest as refusal:
        event(f"refused: {refusal.code}")
        return
    if (reason := walker.verdict(grammar)) is not None:
        event(f"refused: {reason[:40]}")
        return
    # Raises at a dead end.
    text = walker.answer(grammar, dice)
    event("endless" if text is None else "answered")
    # Few random letters match some patterns and formats.
    assert text is not None or re.search('"(pattern|format)', asked.json_schema)
    if text is not None:
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        except RecursionError:
            event("without an end to its validator")


COMMON: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, derandomize=True, **COMMON)
@given(schema=SCHEMAS, dice=st.randoms(use_true_random=False))
def test_a_generated_schema_is_refused_or_kept(
    walker: Walker, schema: Schema, dice: random.Random
) -> None:
    check(walker, schema, dice)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, **COMMON)
@given(schema=SCHEMAS, dice=st.randoms(use_true_random=False))
def test_thousands_of_generated_schemas_are_followed(
    walker: Walker, schema: Schema, dice: random.Random
) -> None:
    check(walker, schema, dice)
