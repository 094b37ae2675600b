"""Arrays whose items differ, where the items are few constants: their values are listed, since no
grammar remembers what an array had before."""

from __future__ import annotations

import itertools
import math
from typing import Any

from .references import is_local, target_of

Schema = dict[str, Any]
MAX_ARRAYS = 400
"""Largest number of arrays that are listed: all of five constants, or of eight where an array has
three at most."""
_OF_ARRAYS = {"type", "items", "uniqueItems", "minItems", "maxItems"}
_OF_CONSTANTS = {"type", "enum", "const"}
_TYPES: dict[object, type] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int,
    "null": type(None),
}
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment"}
_OF_DOCUMENTS = {"$defs", "definitions", "$schema"}
"""Keywords of a whole schema, which restrict nothing."""


def list_unique_arrays(root: Schema, part: Schema) -> None:
    """Replaces `uniqueItems` of a subschema, in place, by an enumeration of all arrays; removes it
    where an array has at most one item. Other arrays are unchanged."""
    if part.get("uniqueItems") is not True:
        return
    most = part.get("maxItems")
    if isinstance(most, int) and most <= 1:
        del part["uniqueItems"]
        return
    constants = _constants_of(root, part.get("items"))
    if constants is None or not part.keys() <= _OF_ARRAYS | _ANNOTATIONS | _OF_DOCUMENTS:
        return
    least = part.get("minItems", 0)
    most = len(constants) if most is None else most
    if part.get("type") != "array" or type(least) is not int or type(most) is not int:
        return
    lengths = range(max(least, 0), min(most, len(constants)) + 1)
    if sum(math.perm(len(constants), length) for length in lengths) > MAX_ARRAYS:
        return
    for keyword in _OF_ARRAYS:
        part.pop(keyword, None)
    part["enum"] = [
        list(array) for length in lengths for array in itertools.permutations(constants, length)
    ]


def _constants_of(root: Schema, items: object) -> list[Any] | None:
    """Values of items that are constants, each once; None for other items."""
    if isinstance(items, dict) and items.keys() - _ANNOTATIONS == {"$ref"}:
        items = target_of(root, items["$ref"]) if is_local(items["$ref"]) else None
    if not isinstance(items, dict) or not items.keys() <= _OF_CONSTANTS | _ANNOTATIONS:
        return None
    if items.get("type") == "boolean" and "enum" not in items and "const" not in items:
        return [False, True]
    values = [items["const"]] if "const" in items else items.get("enum")
    if not isinstance(values, list) or not all(_is_plain(value) for value in values):
        return None
    return [value for value in _once(values) if _has_type(value, items.get("type"))]


def _is_plain(value: object) -> bool:
    """Whether values that look different are different: 1 and 1.0 are one number in JSON."""
    return value is None or isinstance(value, str | bool) or type(value) is int


def _once(values: list[Any]) -> list[Any]:
    return list({(type(value), value): value for value in values}.values())


def _has_type(value: object, declared: object) -> bool:
    """Whether a constant has the declared type, or one of the declared types."""
    names = declared if isinstance(declared, list) else [declared]
    return declared is None or any(_TYPES.get(name) is type(value) for name in names)
