"""Visits and rewrites the subschemas of a JSON Schema. Knows which keywords hold schemas, not what
they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Schema = dict[str, Any]
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SINGLE = frozenset(("items", "additionalProperties", "additionalItems"))
_WITH_PARTS = _MAPS | _LISTS | _SINGLE


class Subschema(NamedTuple):
    """A subschema that is an object, and its path."""

    path: str
    schema: Schema
    base: Schema
    """The schema that its references are relative to: the whole one, or the nearest one with an
    id."""
    depth: int
    """Number of subschemas that contain it."""


def subschemas(root: Schema) -> Iterator[Subschema]:
    """Subschemas of a schema, itself included, each before its parts."""
    waiting: list[tuple[str, object, Schema, int]] = [("", root, root, 0)]
    while waiting:
        path, schema, base, depth = waiting.pop()
        if not isinstance(schema, dict):
            continue
        if "$id" in schema:
            base = schema
        yield Subschema(path, schema, base, depth)
        # Most subschemas of a large schema have no parts.
        if not _WITH_PARTS.isdisjoint(schema):
            parts = list(_parts(path, schema))
            waiting += [(where, part, base, depth + 1) for where, part in reversed(parts)]


def rewritten(schema: Any, rewrite: Callable[[Schema, Schema], object]) -> Any:
    """A copy of the schema in which `rewrite(original, copy)` stands for each subschema. The parts
    of `copy` are rewritten already. Values that are no schemas are shared with the original."""
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


def _parts(path: str, schema: Schema) -> Iterator[tuple[str, object]]:
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield f"{path}/{keyword}/{name}", part
        elif keyword in _LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield f"{path}/{keyword}/{i}", part
        elif keyword in _SINGLE:
            yield f"{path}/{keyword}", value
