"""Closes the objects of a JSON Schema, so that they have no properties but those that the schema
names.

A schema without `additionalProperties` allows other properties, and a model that may invent keys
does. Only an object that one subschema alone describes is closed: beside others, as in `allOf`,
each would forbid the properties of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .references import is_local, target_of

OPENING = frozenset(
    (
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "$ref",
        "anyOf",
        "oneOf",
        "allOf",
    )
)
"""Keywords by which a schema may name more properties than `properties` has."""
_SHAPING = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
)
"""Keywords that describe an object's properties; a schema with two of them describes it by both."""
_OF_VALUES = ("additionalProperties", "items", "additionalItems")
Schema = dict[str, Any]


def closed(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` wherever it opens no object by itself. The
    argument is not changed."""
    walk = _Walk(schema)
    walk.visit(schema, alone=True)
    return schema if walk.has_foreign_references else _copy(schema, walk)


def described_alone(schema: Schema) -> Callable[[Schema], bool] | None:
    """Finds for each subschema whether it alone describes its values, wherever it is reached; None
    where references leave the document."""
    walk = _Walk(schema)
    walk.visit(schema, alone=True)
    return None if walk.has_foreign_references else walk.is_alone


class _Walk:
    """Finds the subschemas that describe their values alone, through references."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._alone: dict[int, bool] = {}
        """Whether a subschema, by identity, is the only one that describes its values, however it
        is reached."""
        self.has_foreign_references = False
        """Whether there are references by an id or an anchor: their subschemas are not known
        here."""

    def is_alone(self, schema: Schema) -> bool:
        return self._alone.get(id(schema), False)

    def is_closed(self, schema: Schema) -> bool:
        """Whether `properties` alone determines the properties of the object."""
        if (
            "properties" not in schema
            or not OPENING.isdisjoint(schema)
            or not self.is_alone(schema)
        ):
            return False
        properties = schema["properties"]
        least = schema.get("minProperties", 0)
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        # Requirements of these beyond `properties` can only be other properties.
        return set(map(str, required)) <= properties.keys() and not (
            isinstance(least, int) and least > len(properties)
        )

    def visit(self, schema: object, *, alone: bool) -> None:
        """Marks a subschema and all that it refers to."""
        waiting = [(schema, alone)]
        while waiting:
            part, is_alone = waiting.pop()
            if not isinstance(part, dict):
                continue
            known = self._alone.get(id(part))
            if known is None or (known and not is_alone):
                self._alone[id(part)] = is_alone
                waiting += self._below(part, alone=is_alone)

    def _below(self, schema: Schema, *, alone: bool) -> Iterator[tuple[object, bool]]:
        shaping = [keyword for keyword in _SHAPING if keyword in schema]
        # Subschemas of the same value.
        is_only = alone and len(shaping) == 1
        for keyword in ("anyOf", "oneOf", "allOf"):
            members = schema.get(keyword)
            if isinstance(members, list):
                is_one = is_only and (keyword != "allOf" or len(members) == 1)
                yield from ((member, is_one) for member in members)
        if "$ref" in schema:
            yield self._target(schema["$ref"]), is_only
        # Subschemas of its parts: a property may match several patterns, or be described by the
        # other members.
        is_own = alone and not {"allOf", "$ref", "anyOf", "oneOf"} & schema.keys()
        for keyword in ("properties", "patternProperties"):
            parts = schema.get(keyword)
            if isinstance(parts, dict):
                is_matched_once = is_own and "patternProperties" not in schema
                yield from ((part, is_matched_once) for part in parts.values())
        for keyword in _OF_VALUES:
            yield schema.get(keyword), is_own
        for keyword in ("prefixItems", "items"):
            parts = schema.get(keyword)
            if isinstance(parts, list):
                yield from ((part, is_own) for part in parts)

    def _target(self, reference: object) -> object:
        if not is_local(reference):
            self.has_foreign_references = True
            return None
        return target_of(self._root, reference)


def _copy(value: Any, walk: _Walk) -> Any:
    if isinstance(value, list):
        return [_copy(each, walk) for each in value]
    if not isinstance(value, dict):
        return value
    copy = {key: _copy(each, walk) for key, each in value.items()}
    return copy | {"additionalProperties": False} if walk.is_closed(value) else copy
