"""Types of a tool's arguments by its schema, and the JSON of values that a model wrote without
quotes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from headwater.proto.common_pb2 import AnswerFormat, ArgumentTypes, Tool, ToolTypes

from .call_reader import with_halves_escaped
from .text_input import KEY

Types = frozenset[str]
"""Names of types of JSON Schema; empty: any."""
TEXT: Types = frozenset({"string"})
ANY: Types = frozenset()
_MAX_DEPTH = 8
"""Largest number of references and alternatives that are followed to find a type."""
_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_WORDS = ("True", "False", "None")


def tool_types(tool: Tool) -> ToolTypes:
    """Types of the arguments of an offered tool. A schema that is no JSON gives none: it is refused
    elsewhere."""
    if tool.HasField("custom_input"):
        return ToolTypes(tool=tool.name, arguments={KEY: ArgumentTypes(types=TEXT)})
    try:
        schema = json.loads(tool.parameters_json or "{}")
    except (ValueError, RecursionError):
        schema = {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    named = {
        name: sorted(types)
        for name, each in (properties.items() if isinstance(properties, dict) else ())
        if (types := types_of(each, schema))
    }
    return ToolTypes(
        tool=tool.name,
        arguments={name: ArgumentTypes(types=types) for name, types in named.items()},
    )


def types_by_tool(form: AnswerFormat) -> dict[str, dict[str, Types]]:
    """Types by tool and argument."""
    return {
        each.tool: {name: frozenset(entry.types) for name, entry in each.arguments.items()}
        for each in form.tool_types
    }


def types_of(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> Types:
    """Types that a schema inside of `whole` allows; `ANY` where it does not limit them."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY
    found = ANY
    match schema:
        case {"$ref": str(path)}:
            found = types_of(_at(path, whole), whole, depth + 1)
        case {"type": str(name)}:
            found = frozenset({name})
        case {"type": [*names]}:
            found = frozenset(name for name in names if isinstance(name, str))
        case {"const": value}:
            found = frozenset({_type_name(value)})
        case {"enum": [*values]}:
            found = frozenset(map(_type_name, values))
        case {"anyOf": [*parts]} | {"oneOf": [*parts]}:
            each = [types_of(part, whole, depth + 1) for part in parts]
            found = frozenset[str]().union(*each) if all(each) else ANY
        case {"allOf": [*parts]}:
            each = [types_of(part, whole, depth + 1) for part in parts]
            found = next(filter(None, each), ANY)
    return found


def value_as_json(text: str, types: Types) -> str:
    """JSON of a value: JSON or Python's spelling of a type that is allowed, or else the text
    itself."""
    written = text.strip()
    if types != TEXT:
        for read in (_from_json, _from_python):
            try:
                value, value_json = read(written)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            if not isinstance(value, str) and _allows(types, value):
                return value_json
    return json.dumps(text, ensure_ascii=False)


def _from_json(text: str) -> tuple[Any, str]:
    return json.loads(text, parse_constant=_refuse), text


def _from_python(text: str) -> tuple[Any, str]:
    if text not in _WORDS and text[:1] not in ("[", "{", "("):
        raise ValueError(text)
    value = ast.literal_eval(text)
    return value, with_halves_escaped(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _allows(types: Types, value: Any) -> bool:
    name = _type_name(value)
    return not types or name in types or (name == "integer" and "number" in types)


def _type_name(value: Any) -> str:
    return _NAMES.get(type(value), "array")


def _at(path: str, whole: Any) -> Any:
    """Part of a schema that a local reference names; None where there is none."""
    if not path.startswith("#"):
        return None
    for step in filter(None, path[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(whole, dict) or key not in whole:
            return None
        whole = whole[key]
    return whole
