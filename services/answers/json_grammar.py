"""Grammars of calls in the formats whose calls are JSON objects: rows of `object_formats` and
`list_formats`, Llama 3 and xLAM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from .forms import Form, OfferedTool, const, or_text, separated, sequence, tag, triggered
from .list_formats import LIST_FORMATS, ListFormat
from .object_formats import ObjectFormat
from .tool_format import ToolFormat


def object_format(form: ObjectFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(_object_calls, form),
        free=partial(_object_free, form),
        opening=form.begin.strip(),
    )


def list_format(form: ListFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(_list_calls, form),
        free=partial(_list_free, form),
        opening=form.begin,
    )


def _object_calls(form: ObjectFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated(_objects(form, tools), form.between, single)


def _object_free(form: ObjectFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return triggered(form.begin.strip(), _objects(form, tools), single)


def _objects(form: ObjectFormat, tools: Sequence[OfferedTool]) -> list[Form]:
    return [_object(tool, form.begin, form.end, form.arguments_key) for tool in tools]


def _object(tool: OfferedTool, begin: str, end: str, key: str = "arguments") -> Form:
    opening = f'{begin}{{"name": {json.dumps(tool.name)}, "{key}": '
    return tag(opening, tool.arguments, f"}}{end}")


def _list_calls(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    ends = [const(form.end)] if form.end else []
    return sequence(const(form.begin), _list(form, tools, single), *ends)


def _list_free(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return triggered(form.begin, [tag(form.begin, _list(form, tools, single), form.end)], True)


def _list(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = separated([_listed(form, tool) for tool in tools], form.between, single)
    return sequence(const(form.list_begin), calls, const(form.list_end))


def _listed(form: ListFormat, tool: OfferedTool) -> Form:
    name = json.dumps(tool.name)
    if not form.name_key:
        return tag(f"{{{name}: ", tool.arguments, "}")
    named = f'"{form.name_key}": {name}, "{form.arguments_key}": '
    if not form.id_key:
        return tag(f"{{{named}", tool.arguments, "}")
    number = {"type": "regex", "pattern": "[0-9]{1,4}"}
    content = sequence(number, const(f'", {named}'), tool.arguments)
    return tag(f'{{"{form.id_key}": "', content, "}")


def _mistral_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_list_calls(LIST_FORMATS["mistral"], tools, single), r"\[")


def _xlam_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = separated([_object(tool, "", "") for tool in tools], ", ", single)
    return sequence(const("["), calls, const("]"))


def _xlam_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_xlam_calls(tools, single), r"\[")


def _llama_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated([_object(tool, "", "", "parameters") for tool in tools], "; ", single)


def _llama_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_llama_calls(tools, single), "{")


def _json_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    """Grammar of calls as JSON. Each begins with a fixed text: the first tokens decide for one
    tool."""
    return separated([_json_call(tool) for tool in tools], "; ", single)


def _json_call(tool: OfferedTool) -> Form:
    if tool.input is not None:
        return _object(tool, "", "", "parameters")
    # Definitions get their own `$id`, so that references within them stay valid.
    parameters = {"$id": f"urn:headwater:{tool.name}"} | tool.parameters
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return tag("", {"type": "json_schema", "json_schema": call}, "")


# It writes no text before calls.
MISTRAL = replace(list_format(LIST_FORMATS["mistral"]), free=_mistral_free, opening="")
XLAM = ToolFormat(signs=(('"tool_call_name"',),), calls=_xlam_calls, free=_xlam_free)
LLAMA = ToolFormat(
    signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
    calls=_llama_calls,
    free=_llama_free,
    calls_beside_json=_json_calls,
)
