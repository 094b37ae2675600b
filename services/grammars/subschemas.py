"""The places of a JSON Schema where schemas stand: visits them, and rewrites them. Knows keywords that
hold schemas, not what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SINGLE = frozenset(("items", "additionalProperties", "additionalItems"))


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema that is an object, and its place."""

    path: str
    schema: Schema
    base: Schema
    """The schema that its references are relative to: the whole one, or the nearest one with an
    id."""


def subschemas(root: Schema) -> Iterator[Subschema]:
    """All subschemas, each before its parts. The root is one."""
    yield from _below("", root, root)


def rewritten(schema: Any, rewrite: Callable[[Schema, Schema], object]) -> Any:
    """A copy of the schema in which `rewrite(original, copy)` stands for each subschema. The parts of
    `copy` are rewritten already. Values that are no schemas are shared with the original."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            copy[keyword] = {name: rewritten(part, rewrite) for name, part in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            copy[keyword] = [rewritten(part, rewrite) for part in value]
        elif keyword in _SINGLE:
            copy[keyword] = rewritten(value, rewrite)
    return rewrite(schema, copy)


def _below(path: str, schema: object, base: Schema) -> Iterator[Subschema]:
    if not isinstance(schema, dict):
        return
    if "$id" in schema:
        base = schema
    yield Subschema(path, schema, base)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _below(f"{path}/{keyword}/{name}", part, base)
        elif keyword in _LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield from _below(f"{path}/{keyword}/{i}", part, base)
        elif keyword in _SINGLE:
            yield from _below(f"{path}/{keyword}", value, base)
