"""Grammars of calls in Gemma 4's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .argument_types import TEXT, types_of
from .forms import ANY_TEXT, Form, OfferedTool, const, in_order, inside, one_of, sequence, tag
from .forms import separated as separated_tags
from .gemma_parser import CALL, CLOSING, OPENING, QUOTE
from .marked_grammar import text_form
from .text_input import KEY

_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_MAX_DEPTH = 4
"""Depth of lists and objects that no schema describes."""
_STRING: Form = tag(QUOTE, ANY_TEXT, QUOTE)
_SCALAR: Form = {
    "type": "regex",
    "pattern": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null",
}
_KEY: Form = {"type": "regex", "pattern": r"[A-Za-z0-9_.$-]+"}


def gemma_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated_tags([_call(tool) for tool in tools], "", single)


def gemma_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": [OPENING],
        "tags": [_call(tool) for tool in tools],
        "stop_after_first": single,
    }


def _call(tool: OfferedTool) -> Form:
    begin = f"{OPENING}{CALL}{tool.name}"
    if tool.input is not None:
        return tag(f"{begin}{{{KEY}:{QUOTE}", tool.text or ANY_TEXT, f"{QUOTE}}}{CLOSING}")
    return tag(begin, _object(tool.parameters, tool.parameters), CLOSING)


def _object(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Form:
    if "properties" not in schema:
        return _members(_pair(_KEY, _any(_MAX_DEPTH)), "{", "}")
    properties: Mapping[str, Any] = schema["properties"]
    values = {
        name: sequence(const(f"{name}:"), _value(each, whole)) for name, each in properties.items()
    }
    return sequence(const("{"), *in_order(values, schema.get("required", []), ","), const("}"))


def _value(schema: Any, whole: Mapping[str, Any]) -> Form:
    """Grammar of a value. Of types that are joined, and of references to objects, any value."""
    types = types_of(schema, whole)
    match schema:
        case {"const": value} | {"enum": [value]}:
            return _constant(value)
        case {"enum": [*values]} if values:
            return one_of([_constant(value) for value in values])
        case {"type": "string"}:
            return tag(QUOTE, text_form(schema), QUOTE)
        case {"properties": {}} if types == {"object"}:
            return _object(schema, whole)
        case {"items": dict(item)} if types == {"array"}:
            return _members(_value(item, whole), "[", "]")
    is_scalar = bool(types) and types <= _SCALARS
    as_json = {"type": "json_schema", "json_schema": inside(schema, whole)}
    return as_json if is_scalar else _STRING if types == TEXT else _any(_MAX_DEPTH)


def _constant(value: Any) -> Form:
    if isinstance(value, str):
        return const(f"{QUOTE}{value}{QUOTE}")
    return const(json.dumps(value)) if not isinstance(value, list | dict) else _any(_MAX_DEPTH)


def _any(depth: int) -> Form:
    """Grammar of any value. The value inside of lists and objects is one form, and so one rule."""
    if depth == 0:
        return one_of([_STRING, _SCALAR])
    inner = _any(depth - 1)
    return one_of(
        [_STRING, _SCALAR, _members(inner, "[", "]"), _members(_pair(_KEY, inner), "{", "}")]
    )


def _pair(key: Form, value: Form) -> Form:
    return sequence(key, const(":"), value)


def _members(member: Form, begin: str, end: str) -> Form:
    """Grammar of a list or an object of any number of members."""
    members = {
        "type": "tags_with_separator",
        "tags": [tag("", member, "")],
        "separator": ",",
        "at_least_one": False,
    }
    return sequence(const(begin), members, const(end))
