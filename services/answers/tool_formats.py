"""Formats in which families of models write calls, as grammars, and the family of a chat template.

Formats that are regular are rows of `marked_formats` or `list_formats`; the parsers of the others are
in `tool_parsers` and in `…_parser` files of one format each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import gemma_parser as gemma
from . import harmony_parser as harmony
from . import olmo_parser as olmo
from .forms import (
    ANY_TEXT,
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
)
from .gemma_grammar import gemma_calls, gemma_free
from .list_formats import LIST_FORMATS, ListFormat
from .marked_formats import MARKED_FORMATS, MarkedFormat
from .marked_grammar import marked_calls, marked_free
from .text_input import KEY

_ANY_NAME = r"""[^ \t\r\n,=()\[\]{}"']+"""
_ANY_VALUES = r"""([^()"']|"([^"\\]|\\.)*"|'([^'\\]|\\.)*')*"""
_ANY_PYTHON = f"({_ANY_NAME}={_ANY_VALUES})?"
"""Pattern of arguments of which only the ends of strings are known, and that the first has a
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which one family writes calls."""

    signs: tuple[tuple[str, ...], ...]
    """Sets of texts; all texts of at least one of them occur in the chat templates of the
    family."""
    calls: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer of nothing but calls; of exactly one call where the second argument says
    so."""
    free: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer that may call, and whose calls match their schemas."""
    opening: str = ""
    """Text with which calls begin anywhere in an answer; empty where they begin otherwise."""
    frame: str = ""
    """Text before content, where answers without calls have one."""
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
        if any(all(text in (template or "") for text in sign) for sign in form.signs)
    )
    return next(found, "hermes")


def _tag(tool: OfferedTool, begin: str, end: str, key: str = "arguments") -> Form:
    opening = f'{begin}{{"name": {json.dumps(tool.name)}, "{key}": '
    return {"type": "tag", "begin": opening, "content": tool.arguments, "end": f"}}{end}"}


def _hermes_tags(tools: Sequence[OfferedTool]) -> list[Form]:
    return [_tag(tool, "<tool_call>\n", "\n</tool_call>") for tool in tools]


def _hermes_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated(_hermes_tags(tools), "\n", single)


def _hermes_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": _hermes_tags(tools),
        "stop_after_first": single,
    }


def _llama_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return separated([_tag(tool, "", "", "parameters") for tool in tools], "; ", single)


def _json_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    """Grammar of calls that is read as JSON: a fixed text from `{` on leaves no way back to another
    object."""
    return separated([_json_call(tool) for tool in tools], "; ", single)


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
    return or_text(_llama_calls(tools, single), "{")


def _list_calls(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    ends = [const(form.end)] if form.end else []
    return sequence(const(form.begin), _call_list(form, tools, single), *ends)


def _list_free(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": [form.begin],
        "tags": [
            {
                "type": "tag",
                "begin": form.begin,
                "content": _call_list(form, tools, single),
                "end": form.end,
            }
        ],
        "stop_after_first": True,
    }


def _call_list(form: ListFormat, tools: Sequence[OfferedTool], single: bool) -> Form:
    return sequence(
        const("["), separated([_listed(form, tool) for tool in tools], ", ", single), const("]")
    )


def _listed(form: ListFormat, tool: OfferedTool) -> Form:
    name = f'"{form.name_key}": {json.dumps(tool.name)}, "{form.arguments_key}": '
    if not form.id_key:
        return {"type": "tag", "begin": f"{{{name}", "content": tool.arguments, "end": "}"}
    number = {"type": "regex", "pattern": "[0-9]{1,4}"}
    content = sequence(number, const(f'", {name}'), tool.arguments)
    return {"type": "tag", "begin": f'{{"{form.id_key}": "', "content": content, "end": "}"}


def _mistral_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_list_calls(LIST_FORMATS["mistral"], tools, single), r"\[")


def _xlam_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = separated([_tag(tool, "", "") for tool in tools], ", ", single)
    return sequence(const("["), calls, const("]"))


def _xlam_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_xlam_calls(tools, single), r"\[")


def _pythonic_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    one = one_of([_pythonic_call(tool) for tool in tools])
    more = {"type": "tag", "begin": ", ", "content": one, "end": ""}
    others = {"type": "tags_with_separator", "tags": [more], "separator": "", "at_least_one": False}
    elements = [const("["), one, *([] if single else [others]), const("]")]
    return sequence(*elements)


def _olmo_section(tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = [tag("", _pythonic_call(tool), "") for tool in tools]
    return sequence(separated(calls, "\n", single), const("\n"))


def _olmo_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    return sequence(const(f"{olmo.OPENING}\n"), _olmo_section(tools, single), const(olmo.CLOSING))


def _olmo_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    section = tag(f"{olmo.OPENING}\n", _olmo_section(tools, single), olmo.CLOSING)
    return {
        "type": "triggered_tags",
        "triggers": [olmo.OPENING],
        "tags": [section],
        "stop_after_first": True,
    }


def _pythonic_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return or_text(_pythonic_calls(tools, single), r"\[")


def _pythonic_call(tool: OfferedTool) -> Form:
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


def _harmony_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    begin = f"{harmony.CHANNEL}commentary to=functions."
    behind = f" {harmony.CONSTRAIN}json{harmony.MESSAGE}"
    calls = [tag(f"{begin}{tool.name}{behind}", tool.arguments, "") for tool in tools]
    return separated(calls, harmony.CALL + harmony.NEXT, single)


def _harmony_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return one_of([_harmony_calls(tools, single), sequence(const(harmony.FINAL), ANY_TEXT)])


def _marked(form: MarkedFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(marked_calls, form),
        free=partial(marked_free, form),
        opening=form.opening,
    )


def _listed_format(form: ListFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(_list_calls, form),
        free=partial(_list_free, form),
        opening=form.begin,
    )


# The parser of the older format reads this one, too.
_TEKKEN = MarkedFormat(
    signs=("[TOOL_CALLS]", "[ARGS]"), begin="[TOOL_CALLS]", name_end="[ARGS]", end=""
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **{name: _marked(form) for name, form in MARKED_FORMATS.items()},
    "gpt_oss": ToolFormat(
        signs=((harmony.CHANNEL, harmony.MESSAGE),),
        calls=_harmony_calls,
        free=_harmony_free,
        frame=harmony.FINAL,
    ),
    "gemma4": ToolFormat(
        signs=((gemma.OPENING,),), calls=gemma_calls, free=gemma_free, opening=gemma.OPENING
    ),
    "mistral_tekken": _marked(_TEKKEN),
    # It writes no text before calls.
    "mistral": replace(_listed_format(LIST_FORMATS["mistral"]), free=_mistral_free, opening=""),
    **{name: _listed_format(form) for name, form in LIST_FORMATS.items() if name != "mistral"},
    "olmo3": ToolFormat(
        signs=((olmo.OPENING,),), calls=_olmo_calls, free=_olmo_free, opening=olmo.OPENING
    ),
    "xlam": ToolFormat(signs=(('"tool_call_name"',),), calls=_xlam_calls, free=_xlam_free),
    "hermes": ToolFormat(
        signs=(("<tool_call>",),),
        calls=_hermes_calls,
        free=_hermes_free,
        opening="<tool_call>",
    ),
    "pythonic": ToolFormat(
        signs=(("<|python_start|>",), ("func_name1(",)), calls=_pythonic_calls, free=_pythonic_free
    ),
    "llama3_json": ToolFormat(
        signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
        calls=_llama_calls,
        free=_llama_free,
        is_json=True,
    ),
}
"""Formats, in the order in which their signs are looked for."""
