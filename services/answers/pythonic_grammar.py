"""Grammars of calls that are written as Python, alone or in the formats of `pythonic_formats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .forms import (
    Form,
    OfferedTool,
    const,
    in_order,
    inside,
    one_of,
    or_text,
    separated,
    sequence,
    tag,
    triggered,
)
from .pythonic_formats import PythonicFormat
from .text_input import KEY
from .tool_format import ToolFormat

_ANY_NAME = r"""[^ \t\r\n,=()\[\]{}"']+"""
_ANY_VALUES = r"""([^()"']|"([^"\\]|\\.)*"|'([^'\\]|\\.)*')*"""
_ANY_PYTHON = f"({_ANY_NAME}={_ANY_VALUES})?"
"""Pattern of arguments of which only the ends of strings are known, and that the first has a
name."""


def _pythonic_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    one = one_of([_call(tool) for tool in tools])
    more = {"type": "tag", "begin": ", ", "content": one, "end": ""}
    others = {"type": "tags_with_separator", "tags": [more], "separator": "", "at_least_one": False}
    elements = [const("["), one, *([] if single else [others]), const("]")]
    return sequence(*elements)


def _pythonic_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_pythonic_calls(tools, single), r"\[")


def section_format(form: PythonicFormat) -> ToolFormat:
    return ToolFormat(
        signs=tuple((sign,) for sign in form.signs),
        calls=partial(_section_calls, form),
        free=partial(_section_free, form),
        opening=form.begin,
    )


def _section_calls(form: PythonicFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return sequence(const(form.begin), _section(form, tools, single), const(form.end))


def _section_free(form: PythonicFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return triggered(form.begin, [tag(form.begin, _section(form, tools, single), form.end)], True)


def _section(form: PythonicFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = separated([tag("", _call(tool), "") for tool in tools], form.between, single)
    return sequence(const(form.list_begin), calls, const(form.list_end))


def _call(tool: OfferedTool) -> Form:
    """Grammar of a call with arguments by name, in the schema's order: the required ones, then any
    of the others."""
    if tool.input is not None:
        return sequence(const(f"{tool.name}({KEY}="), tool.input, const(")"))
    if "properties" not in tool.parameters:
        return sequence(
            const(f"{tool.name}("), {"type": "regex", "pattern": _ANY_PYTHON}, const(")")
        )
    properties: Mapping[str, Any] = tool.parameters["properties"]
    values = {
        name: sequence(
            const(f"{name}="),
            {"type": "json_schema", "json_schema": inside(properties[name], tool.parameters)},
        )
        for name in properties
    }
    arguments = in_order(values, tool.parameters.get("required", []), ", ")
    return sequence(const(f"{tool.name}("), *arguments, const(")"))


PYTHONIC = ToolFormat(
    signs=(("<|python_start|>",), ("func_name1(",)), calls=_pythonic_calls, free=_pythonic_free
)
