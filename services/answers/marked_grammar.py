"""Grammars of calls in the formats of `marked_formats`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .argument_types import TEXT, types_of
from .forms import (
    ANY_TEXT,
    Form,
    OfferedTool,
    const,
    in_order,
    inside,
    one_of,
    separated,
    sequence,
    tag,
    triggered,
)
from .marked_formats import MarkedFormat, Parameters
from .text_input import KEY
from .tool_format import ToolFormat

_NOTHING: Form = {"type": "regex", "pattern": "()"}
_KEY: Form = {"type": "regex", "pattern": r'[^<>"\s]+'}
"""Name of an argument that no schema names."""


def marked_format(form: MarkedFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(_marked_calls, form),
        free=partial(_marked_free, form),
        opening=form.opening,
    )


def _marked_calls(form: MarkedFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    """Grammar of an answer of nothing but calls."""
    calls = [_call(form, tool) for tool in tools]
    if form.has_section_each or not any(form.section):
        return separated([_in_section(form, call) for call in calls], form.between, single)
    return _section(form, calls, single)


def _marked_free(form: MarkedFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    """Grammar of an answer that may call, and whose calls match their schemas."""
    calls = [_call(form, tool) for tool in tools]
    if form.has_section_each or not any(form.section):
        tags = [_in_section(form, call) for call in calls]
    else:
        tags = [_section(form, calls, single)]
    return triggered(form.opening, tags, single)


def _section(form: MarkedFormat, calls: list[Form], single: bool) -> Form:
    return tag(form.section[0], separated(calls, form.between, single), form.section[1])


def _in_section(form: MarkedFormat, call: Form) -> Form:
    begin, end = form.section
    return call | {"begin": f"{begin}{call['begin']}", "end": f"{call['end']}{end}"}


def _call(form: MarkedFormat, tool: OfferedTool) -> Form:
    begin = f"{form.begin}{form.name_prefix}{tool.name}"
    arguments = tool.arguments if form.parameters is None else _arguments(form.parameters, tool)
    if form.id_pattern:
        between = {"type": "regex", "pattern": form.id_pattern}
        return tag(begin, sequence(between, const(form.name_end), arguments), form.end)
    return tag(f"{begin}{form.name_end}", arguments, form.end)


def _arguments(marks: Parameters, tool: OfferedTool) -> Form:
    """Grammar of arguments in the schema's order: the required ones, then any of the others."""
    if tool.input is not None:
        return _argument(marks, KEY, tool.text or ANY_TEXT, marks.text_sign)
    if "properties" not in tool.parameters:
        return _any_arguments(marks)
    properties: Mapping[str, Any] = tool.parameters["properties"]
    values = {
        name: _property(marks, name, schema, tool.parameters) for name, schema in properties.items()
    }
    elements = in_order(values, tool.parameters.get("required", []), "")
    return sequence(*elements) if elements else _NOTHING


def _any_arguments(marks: Parameters) -> Form:
    signs = dict.fromkeys((marks.text_sign, marks.json_sign))
    texts = [tag(f"{sign}{marks.name_end}{marks.margin}", ANY_TEXT, marks.end) for sign in signs]
    one = tag(marks.begin, sequence(_KEY, one_of(texts)), marks.between)
    return {
        "type": "tags_with_separator",
        "tags": [one],
        "separator": "",
        "at_least_one": False,
    }


def _property(marks: Parameters, name: str, schema: Any, whole: Mapping[str, Any]) -> Form:
    types = types_of(schema, whole)
    match schema:
        case {"const": value}:
            return _choice(marks, name, [value])
        case {"enum": [*values]} if values:
            return _choice(marks, name, values)
    if types == TEXT:
        return _argument(marks, name, text_form(schema), marks.text_sign)
    as_json = _argument(
        marks, name, {"type": "json_schema", "json_schema": inside(schema, whole)}, marks.json_sign
    )
    if types and not types & TEXT:
        return as_json
    as_text = _argument(marks, name, ANY_TEXT, marks.text_sign)
    # Without signs, text may be anything, JSON too.
    return one_of([as_text, as_json]) if marks.text_sign else as_text


def _choice(marks: Parameters, name: str, values: Sequence[Any]) -> Form:
    """Grammar of an argument that is one of the values."""
    return one_of(
        [
            _argument(marks, name, const(value), marks.text_sign)
            if isinstance(value, str) and value
            else _argument(marks, name, _NOTHING, marks.text_sign)
            if value == ""
            else _argument(marks, name, const(json.dumps(value)), marks.json_sign)
            for value in values
        ]
    )


def _argument(marks: Parameters, name: str, value: Form, sign: str) -> Form:
    begin = f"{marks.begin}{name}{sign}{marks.name_end}{marks.margin}"
    # Any text ends with the first end mark, as it does for the reader, which takes the margin away.
    end = marks.end if value == ANY_TEXT else f"{marks.margin}{marks.end}"
    one = tag(begin, value, end)
    return sequence(one, const(marks.between)) if marks.between else one


def text_form(schema: Mapping[str, Any]) -> Form:
    """Grammar of a string without quotes. Formats are not enforced: they are annotations."""
    if isinstance(schema.get("pattern"), str):
        return {"type": "regex", "pattern": _searched(schema["pattern"])}
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return (
        ANY_TEXT
        if not (least or most)
        else {"type": "regex", "pattern": rf"(?s:.{{{least},{most}}})"}
    )


def _searched(pattern: str) -> str:
    """Pattern of a whole text in which the pattern is found."""
    is_begun = pattern.startswith("^")
    is_ended = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[is_begun : len(pattern) - is_ended]
    return f"{'' if is_begun else '(?s:.*)'}({body}){'' if is_ended else '(?s:.*)'}"
