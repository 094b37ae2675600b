"""Grammars of calls as structural tags: tools that are offered, and what formats are composed of.

Knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .text_input import KEY

Form = dict[str, Any]
"""A format in structural tags."""
ANY_ARGUMENTS: Form = {"type": "object"}
NO_ARGUMENTS: Form = {"type": "object", "properties": {}}
ANY_TEXT: Form = {"type": "any_text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A function that the answer may call, or a custom tool."""

    name: str
    parameters: dict[str, Any]
    """JSON Schema of its arguments."""
    input: Form | None = None
    """JSON string of a custom tool's text, its one argument."""
    text: Form | None = None
    """The same text without quotes and escapes."""

    @property
    def arguments(self) -> Form:
        """JSON Schema of the object of its arguments."""
        if self.input is None:
            return {"type": "json_schema", "json_schema": self.parameters}
        return sequence(const(f'{{"{KEY}": '), self.input, const("}"))


def const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Form]) -> Form:
    return {"type": "or", "elements": list(elements)}


def perhaps(*elements: Form) -> Form:
    return one_of([sequence(*elements), {"type": "regex", "pattern": "()"}])


def tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Form], separator: str, single: bool) -> Form:
    """Grammar of at least one of the tags, any number of times, or exactly one where `single`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def triggered(trigger: str, tags: Sequence[Form], single: bool) -> Form:
    """Grammar of text in which the trigger begins one of the tags: any number of them, or at most
    one where `single`."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "stop_after_first": single,
    }


def or_text(calls: Form, openings: str) -> Form:
    """Grammar of calls, or of an answer that begins otherwise."""
    text = {"type": "regex", "pattern": rf"([^\s{openings}](?s:.*))?"}
    return one_of([calls, text])


def inside(schema: Any, whole: Mapping[str, Any]) -> Any:
    """Part of a schema, with the definitions that it may refer to."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return schema | shared if isinstance(schema, dict) and shared else schema


def in_order(values: Mapping[str, Form], required: Sequence[str], separator: str) -> list[Form]:
    """Grammars of arguments in a fixed order: the required ones, then any of the others."""
    between = [const(separator)] if separator else []
    fixed: list[Form] = []
    for name in values:
        if name in required:
            fixed += [*(between if fixed else []), values[name]]
    optional = [value for name, value in values.items() if name not in required]
    if not optional:
        return fixed
    return [*fixed, perhaps(*(between if fixed else []), _some(optional, between))]


def _some(values: list[Form], between: list[Form]) -> Form:
    """Grammar of at least one of the values, in order. Both halves reference the same form, which
    is one rule of the grammar, so its size grows linearly with the number of values."""
    if len(values) == 1:
        return values[0]
    first, second = (
        _some(half, between) for half in (values[: len(values) // 2], values[len(values) // 2 :])
    )
    return one_of([sequence(first, perhaps(*between, second)), second])
