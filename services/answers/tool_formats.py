"""Formats in which families of models write calls, as grammars, and the family of a chat template.

Their parsers are in `tool_parsers` and `pythonic_parser`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .text_input import KEY

Form = dict[str, Any]
"""A format in structural tags."""
ANY_ARGUMENTS: Form = {"type": "object"}
NO_ARGUMENTS: Form = {"type": "object", "properties": {}}
_ANY_NAME = r"""[^ \t\r\n,=()\[\]{}"']+"""
_ANY_VALUES = r"""([^()"']|"([^"\\]|\\.)*"|'([^'\\]|\\.)*')*"""
_ANY_PYTHON = f"({_ANY_NAME}={_ANY_VALUES})?"
"""Pattern of arguments of which only the ends of strings are known, and that the first has a
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A function that the answer may call, or a custom tool."""

    name: str
    parameters: dict[str, Any]
    """JSON Schema of its arguments."""
    input: Form | None = None
    """JSON string of a custom tool's text, its one argument."""

    @property
    def arguments(self) -> Form:
        """JSON Schema of the object of its arguments."""
        if self.input is None:
            return {"type": "json_schema", "json_schema": self.parameters}
        return _sequence(_const(f'{{"{KEY}": '), self.input, _const("}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which one family writes calls."""

    signs: tuple[str, ...]
    """Texts of which at least one occurs in the chat templates of the family."""
    calls: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer of nothing but calls; of exactly one call where the second argument says
    so."""
    free: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer that may call, and whose calls match their schemas."""
    is_json: bool = False
    """Whether a call is JSON from its first character, as other answers may be."""

    def instead(self, tools: Sequence[OfferedTool], single: bool) -> Form:
        """Grammar of an answer of nothing but calls, as an alternative to another constraint, JSON
        for example."""
        return _json_calls(tools, single) if self.is_json else self.calls(tools, single)


def format_of_template(template: str | None) -> str:
    """Name of the family by its chat template; Hermes where the template gives no sign."""
    found = (
        name
        for name, form in TOOL_FORMATS.items()
        if any(sign in (template or "") for sign in form.signs)
    )
    return next(found, "hermes")


def _tag(tool: OfferedTool, begin: str, end: str, key: str = "arguments") -> Form:
    opening = f'{begin}{{"name": {json.dumps(tool.name)}, "{key}": '
    return {"type": "tag", "begin": opening, "content": tool.arguments, "end": f"}}{end}"}


def _list(tags: list[Form], separator: str, single: bool) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def _or_text(calls: Form, openings: str) -> Form:
    """Grammar of calls, or of an answer that begins otherwise."""
    text = {"type": "regex", "pattern": rf"([^\s{openings}](?s:.*))?"}
    return {"type": "or", "elements": [calls, text]}


def _hermes_tags(tools: Sequence[OfferedTool]) -> list[Form]:
    return [_tag(tool, "<tool_call>\n", "\n</tool_call>") for tool in tools]


def _hermes_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return _list(_hermes_tags(tools), "\n", single)


def _hermes_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": _hermes_tags(tools),
        "stop_after_first": single,
    }


def _llama_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return _list([_tag(tool, "", "", "parameters") for tool in tools], "; ", single)


def _json_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    """Grammar of calls that is read as JSON: a fixed text from `{` on leaves no way back to another
    object."""
    return _list([_json_call(tool) for tool in tools], "; ", single)


def _json_call(tool: OfferedTool) -> Form:
    if tool.input is not None:
        return _tag(tool, "", "", "parameters")
    # Definitions get an id of their own, so that references within them stay valid.
    parameters = {"$id": f"urn:headwater:{tool.name}"} | tool.parameters
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return {
        "type": "tag",
        "begin": "",
        "content": {"type": "json_schema", "json_schema": call},
        "end": "",
    }


def _llama_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return _or_text(_llama_calls(tools, single), "{")


def _mistral_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = _list([_tag(tool, "", "") for tool in tools], ", ", single)
    return _sequence(_const("[TOOL_CALLS]["), calls, _const("]"))


def _mistral_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return _or_text(_mistral_calls(tools, single), r"\[")


def _pythonic_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    one = _one_of([_pythonic_call(tool) for tool in tools])
    more = {"type": "tag", "begin": ", ", "content": one, "end": ""}
    others = {"type": "tags_with_separator", "tags": [more], "separator": "", "at_least_one": False}
    elements = [_const("["), one, *([] if single else [others]), _const("]")]
    return _sequence(*elements)


def _pythonic_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return _or_text(_pythonic_calls(tools, single), r"\[")


def _pythonic_call(tool: OfferedTool) -> Form:
    """Grammar of a call with arguments by name, in the schema's order: the required ones, then any
    of the others."""
    if tool.input is not None:
        return _sequence(_const(f"{tool.name}({KEY}="), tool.input, _const(")"))
    if "properties" not in tool.parameters:
        return _sequence(
            _const(f"{tool.name}("), {"type": "regex", "pattern": _ANY_PYTHON}, _const(")")
        )
    properties: Mapping[str, Any] = tool.parameters["properties"]
    required = [name for name in properties if name in tool.parameters.get("required", [])]
    optional = [name for name in properties if name not in required]
    values = {
        name: _sequence(
            _const(f"{name}="),
            {"type": "json_schema", "json_schema": _inside(properties[name], tool.parameters)},
        )
        for name in properties
    }
    fixed: list[Form] = []
    for name in required:
        fixed += [*([_const(", ")] if fixed else []), values[name]]
    comma = [_const(", ")] if fixed else []
    tail = [_perhaps(*comma, _some([values[name] for name in optional]))] if optional else []
    return _sequence(_const(f"{tool.name}("), *fixed, *tail, _const(")"))


def _some(values: list[Form]) -> Form:
    """Grammar of at least one of the values, in order, with commas between them. Both halves stand
    in it twice as the same form, which is one rule of the grammar, so that its size grows with the
    number of values."""
    if len(values) == 1:
        return values[0]
    first, second = (
        _some(half) for half in (values[: len(values) // 2], values[len(values) // 2 :])
    )
    return _one_of([_sequence(first, _perhaps(_const(", "), second)), second])


def _perhaps(*elements: Form) -> Form:
    return _one_of([_sequence(*elements), {"type": "regex", "pattern": "()"}])


def _inside(schema: Any, whole: Mapping[str, Any]) -> Any:
    """Part of a schema, with the definitions that it may refer to."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return schema | shared if isinstance(schema, dict) and shared else schema


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _one_of(elements: list[Form]) -> Form:
    return {"type": "or", "elements": elements}


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "mistral": ToolFormat(signs=("[TOOL_CALLS]",), calls=_mistral_calls, free=_mistral_free),
    "hermes": ToolFormat(signs=("<tool_call>",), calls=_hermes_calls, free=_hermes_free),
    "pythonic": ToolFormat(
        signs=("<|python_start|>", "func_name1("), calls=_pythonic_calls, free=_pythonic_free
    ),
    "llama3_json": ToolFormat(
        signs=("<|python_tag|>", '"parameters": dictionary'),
        calls=_llama_calls,
        free=_llama_free,
        is_json=True,
    ),
}
"""Formats, in the order in which their signs are looked for."""
