"""Grammars of calls in the formats of `gemma_formats`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .argument_types import TEXT, Types, types_of
from .forms import (
    ANY_TEXT,
    Form,
    OfferedTool,
    const,
    in_order,
    inside,
    one_of,
    sequence,
    tag,
    triggered,
)
from .forms import separated as separated_tags
from .gemma_formats import CALL, GemmaFormat
from .marked_grammar import text_form
from .text_input import KEY
from .tool_format import ToolFormat

_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_MAX_DEPTH = 4
"""Depth of lists and objects that no schema describes."""
_SCALAR: Form = {
    "type": "regex",
    "pattern": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null",
}
_KEY: Form = {"type": "regex", "pattern": r"[A-Za-z0-9_.$-]+"}


def gemma_format(form: GemmaFormat) -> ToolFormat:
    return ToolFormat(
        signs=((form.begin,),),
        calls=partial(_gemma_calls, form),
        free=partial(_gemma_free, form),
        opening=form.begin,
    )


def _gemma_calls(form: GemmaFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated_tags([_call(form, tool) for tool in tools], "", single)


def _gemma_free(form: GemmaFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return triggered(form.begin, [_call(form, tool) for tool in tools], single)


def _call(form: GemmaFormat, tool: OfferedTool) -> Form:
    begin = f"{form.begin}{CALL}{tool.name}"
    if tool.input is not None:
        text = tool.text or ANY_TEXT
        return tag(f"{begin}{{{KEY}:{form.quote}", text, f"{form.quote}}}{form.end}")
    values = _Values(form.quote, tool.parameters)
    return tag(begin, values.object(tool.parameters), form.end)


class _Values:
    """Grammars of the values in one call; `whole` is the schema of its arguments."""

    def __init__(self, quote: str, whole: Mapping[str, Any]) -> None:
        self._quote = quote
        self._whole = whole
        self._string = tag(quote, ANY_TEXT, quote)

    def object(self, schema: Mapping[str, Any]) -> Form:
        if "properties" not in schema:
            return _members(_pair(_KEY, self._any(_MAX_DEPTH)), "{", "}")
        properties: Mapping[str, Any] = schema["properties"]
        values = {
            name: sequence(const(f"{name}:"), self._value(each))
            for name, each in properties.items()
        }
        return sequence(const("{"), *in_order(values, schema.get("required", []), ","), const("}"))

    def _value(self, schema: Any) -> Form:
        """Grammar of a value. Of types that are joined, and of references to objects, any value."""
        match schema:
            case {"const": value} | {"enum": [value]}:
                return self._constant(value)
            case {"enum": [*values]} if values:
                return one_of([self._constant(value) for value in values])
            case {"type": "string"}:
                return tag(self._quote, text_form(schema), self._quote)
        return self._of_types(schema, types_of(schema, self._whole))

    def _of_types(self, schema: Any, types: Types) -> Form:
        match schema:
            case {"properties": {}} if types == {"object"}:
                return self.object(schema)
            case {"items": dict(item)} if types == {"array"}:
                return _members(self._value(item), "[", "]")
        if types and types <= _SCALARS:
            return {"type": "json_schema", "json_schema": inside(schema, self._whole)}
        return self._string if types == TEXT else self._any(_MAX_DEPTH)

    def _constant(self, value: Any) -> Form:
        if isinstance(value, str):
            return const(f"{self._quote}{value}{self._quote}")
        return self._any(_MAX_DEPTH) if isinstance(value, list | dict) else const(json.dumps(value))

    def _any(self, depth: int) -> Form:
        """Grammar of any value. The value inside of lists and objects is one form, and so one
        rule."""
        if depth == 0:
            return one_of([self._string, _SCALAR])
        inner = self._any(depth - 1)
        lists = _members(inner, "[", "]")
        objects = _members(_pair(_KEY, inner), "{", "}")
        return one_of([self._string, _SCALAR, lists, objects])


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
