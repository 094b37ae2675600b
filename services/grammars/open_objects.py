"""Keeps each declared name of an object under its own schema, where the object may have other names
too.

llguidance excludes declared names from the others as they are spelled without escapes, but lets
others have escapes; and it offers a pattern of names also where no name is left for it.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterator

from ..runtime.errors import BadRequest
from .closed_schema import described_alone
from .name_pattern import Names, name_pattern
from .references import is_local
from .subschemas import Schema, Subschema, rewritten, subschemas

SHORT_ESCAPES = 'nrbtf"\\'
"""Escapes of JSON that name one character each, by their letters."""
_ESCAPED_BY_CODE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that only an escape with a code can write."""
MAX_WORK = 100_000
"""Largest product of the numbers of patterns and names of an object whose patterns are looked
at."""
_WORD = r"0-9A-Za-z_./\-\u0080-\U0010FFFF"
"""Characters that may continue a longer name after a declared one. All others, above all an escaped
quote, are excluded: a model that writes one means to end the declared name."""


def escapes(param: str, root: Schema) -> str | None:
    """Letters of the escapes that strings and names may have; None for all. Where objects are open,
    those with codes are left out, so that a name has one spelling. Raises `BadRequest` where a
    constant needs them."""
    opened = next((each for each in subschemas(root) if is_open(each.schema)), None)
    if opened is None:
        return None
    for each in subschemas(root):
        if any(_ESCAPED_BY_CODE.search(text) for text in _constants(each.schema)):
            raise BadRequest(
                param,
                f"{param} has a control character in a constant at {each.path or 'the top level'}, "
                f"and other properties beside `properties` at {opened.path or 'the top level'}; "
                "allowed: one of them",
                code="unsupported_schema",
            )
    return SHORT_ESCAPES


def is_open(schema: Schema) -> bool:
    """Whether an object has declared names, and may have others."""
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return bool(_names(schema)) and not is_closed


def with_named_patterns(root: Schema) -> Schema:
    """The schema without patterns that match declared names only: the properties of these names
    take over their subschemas."""
    places = {
        id(each.schema): each for each in subschemas(root) if each.schema.get("patternProperties")
    }
    if not places:
        return root
    kept = _referred_to(root)

    def rewrite(original: Schema, copy: Schema) -> Schema:
        place = places.get(id(original))
        if place is None or _is_referred_to(place, kept):
            return copy
        return _without_named_patterns(copy)

    return _changed(root, rewrite)


def with_words_behind_names(root: Schema) -> Schema:
    """The schema with open objects in which another name that begins with a declared one goes on
    with a letter, digit or the like. Only where one subschema describes the object: elsewhere
    patterns have to be disjoint."""
    if not any(is_open(each.schema) for each in subschemas(root)):
        return root
    alone = described_alone(root)
    if alone is None:
        return root

    def rewrite(original: Schema, copy: Schema) -> Schema:
        is_apart = is_open(copy) and not copy.get("patternProperties") and alone(original)
        names = _prefixes(_names(copy)) if is_apart else []
        if not names:
            return copy
        beyond = f"^(?:{'|'.join(map(re.escape, names))})[^{_WORD}]"
        return copy | {"patternProperties": {beyond: False}}

    return _changed(root, rewrite)


def _changed(root: Schema, rewrite: Callable[[Schema, Schema], object]) -> Schema:
    changed = rewritten(root, rewrite)
    assert isinstance(changed, dict)
    return changed


def _without_named_patterns(schema: Schema) -> Schema:
    patterns = schema.get("patternProperties")
    properties = schema.get("properties", {})
    names = _names(schema)
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not names:
        return schema
    if len(patterns) * len(names) > MAX_WORK:
        return schema
    declared = Names(names)
    named = dict(properties)
    left = dict(patterns)
    for expression in patterns:
        pattern = name_pattern(expression)
        matched = None if pattern is None else pattern.only_names(declared)
        if matched is None:
            continue
        del left[expression]
        for name in matched:
            named[name] = _both(named.get(name, True), patterns[expression])
    if len(left) == len(patterns):
        return schema
    return schema | {"properties": named, "patternProperties": left}


def _both(one: object, other: object) -> object:
    if one is True or one == {}:
        return other
    return one if other is True or other == {} else {"allOf": [one, other]}


def _names(schema: Schema) -> list[str]:
    """Declared names: those that `properties` or `required` has."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    names += required if isinstance(required, list) else []
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _prefixes(names: list[str]) -> list[str]:
    """Names that no other declared name continues other than by a word's characters."""
    lengths = set(map(len, names))
    continued = {
        name[: found.start()]
        for name in names
        for found in re.finditer(f"[^{_WORD}]", name)
        if found.start() in lengths
    }
    return [name for name in names if name not in continued]


def _constants(schema: Schema) -> Iterator[str]:
    """Strings in constants, but not names in them: these are written as they are."""
    enum = schema.get("enum")
    waiting = [schema.get("const"), *(enum if isinstance(enum, list) else [])]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def _referred_to(root: Schema) -> list[str]:
    """Places that references name, as paths of subschemas."""
    references = [each.schema.get("$ref") for each in subschemas(root)]
    return [
        urllib.parse.unquote(each[1:]).replace("~1", "/").replace("~0", "~")
        for each in references
        if is_local(each)
    ]


def _is_referred_to(place: Subschema, kept: list[str]) -> bool:
    """Whether a reference names a property of the object, or a part of one."""
    return any(
        each.startswith((f"{place.path}/properties/", f"{place.path}/patternProperties/"))
        for each in kept
    )
