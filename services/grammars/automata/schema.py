"""Builds the automaton of a JSON Schema as `prepared_schema` hands it to llguidance."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Set
from types import NoneType
from typing import Any

from ..prepared_schema import ANNOTATIONS, WHITESPACE
from .builder import (
    LOST,
    Builder,
    ByteAutomaton,
    Int16Array,
    Unfollowed,
    UnfollowedPart,
    either,
    nothing,
)
from .numbers import NUMBER, integer
from .patterns import pattern_steps

MAX_ITEMS = 8
"""Items of an array that are followed one by one."""
MAX_DEPTH = 24
MAX_PATTERN_WORK = 200_000
"""Steps of the states of expressions, for the patterns of one schema."""
Schema = Mapping[str, Any]
_EXACT: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength")),
    "integer": frozenset(("minimum", "maximum")),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""Keywords that are followed, by type."""
_INEXACT: Mapping[str, frozenset[str]] = {
    "string": frozenset(("pattern", "format")),
    "integer": frozenset(("exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ),
}
"""Keywords of values whose end is followed."""
_BESIDE = frozenset(("type", "x-guidance", "$defs", "definitions", "$schema", "$id")) | ANNOTATIONS


_KINDS: Mapping[type, str] = {str: "string", int: "integer", bool: "boolean", NoneType: "null"}
"""Types of values that are spelled in one way."""
_MOST_DIGITS = 15


def schema_automaton(schema: Schema) -> ByteAutomaton:
    """Automaton of the answers to a schema. Parts that it cannot follow lead to `LOST`. Raises
    `Unfollowed` for white space that it does not know, and for too many states."""
    options = schema.get("x-guidance")
    if options not in ({"whitespace_pattern": WHITESPACE}, {"whitespace_flexible": False}):
        raise Unfollowed("its white space is not the usual one")
    builder = Builder()
    values = _Values(schema, builder, has_spaces="whitespace_pattern" in options)
    return builder.finish(values.row_of(schema, None, 0))


class _Values:
    """Transitions of values, each before given ones; None: at the end of the answer."""

    def __init__(self, root: Schema, builder: Builder, *, has_spaces: bool) -> None:
        self._root = root
        self._builder = builder
        self._has_spaces = has_spaces
        self._work_left = MAX_PATTERN_WORK

    def row_of(self, schema: object, behind: Int16Array | None, depth: int) -> Int16Array:
        """Transitions of a value, or to `LOST`."""
        try:
            return self._followed(schema, behind, depth)
        except UnfollowedPart:
            return self._builder.lost()

    def _followed(self, schema: object, behind: Int16Array | None, depth: int) -> Int16Array:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            raise UnfollowedPart
        keywords = schema.keys() - _BESIDE
        kind = schema.get("type")
        if (choices := _choices(schema, keywords)) is not None:
            return self._builder.literals(dict.fromkeys(choices, self._state(behind)))
        if keywords == {"$ref"} and kind is None:
            return self._followed(self._target(schema["$ref"]), behind, depth + 1)
        if keywords == {"anyOf"} and kind is None:
            return self._any_of(schema["anyOf"], behind, depth)
        if isinstance(kind, list):
            return self._any_of([{**schema, "type": each} for each in kind], behind, depth)
        if not isinstance(kind, str) or kind not in _EXACT:
            raise UnfollowedPart
        return self._typed(kind, schema, keywords - _EXACT[kind], behind, depth)

    def _typed(
        self, kind: str, schema: Schema, others: Set[str], behind: Int16Array | None, depth: int
    ) -> Int16Array:
        """`others` are keywords beside those that are followed exactly."""
        if not others <= _INEXACT.get(kind, frozenset()):
            raise UnfollowedPart
        match kind:
            case "object":
                return self._object(schema, behind, depth)
            case "array":
                return self._array(schema, behind, depth)
            case "string" if "pattern" in others:
                return self._pattern(schema, behind)
            case "string":
                return self._string({} if others else schema, behind, is_exact=not others)
            case _:
                return self._number({} if others else schema, behind, is_exact=not others)

    def _string(self, schema: Schema, behind: Int16Array | None, *, is_exact: bool) -> Int16Array:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        text = self._builder.text(least, most, self._state(behind), is_exact=is_exact)
        return self._builder.byte(ord('"'), text)

    def _pattern(self, schema: Schema, behind: Int16Array | None) -> Int16Array:
        try:
            if {"minLength", "maxLength", "format"} & schema.keys():
                raise UnfollowedPart
            steps, ends, work = pattern_steps(schema["pattern"], self._work_left)
        except UnfollowedPart:
            return self._string({}, behind, is_exact=False)
        self._work_left -= work + len(schema["pattern"])
        text = self._builder.pattern(steps, ends, self._state(behind))
        return self._builder.byte(ord('"'), text)

    def _number(self, schema: Schema, behind: Int16Array | None, *, is_exact: bool) -> Int16Array:
        if behind is None:
            # Where an answer may end, whether it goes on depends on more than its bytes.
            raise UnfollowedPart
        table = integer(*_bounds(schema)) if schema.get("type") == "integer" else NUMBER
        return self._builder.embed(*table, behind, is_exact=is_exact)

    def _any_of(self, parts: list[object], behind: Int16Array | None, depth: int) -> Int16Array:
        """Alternatives that their first bytes tell apart. Of several strings or numbers the end is
        followed."""
        choices = list[bytes]()
        others = list[object]()
        num_of_kind = Counter[str]()
        for part in parts:
            some = _choices(part, part.keys() - _BESIDE) if isinstance(part, Mapping) else None
            choices += some or ()
            num_of_kind.update({_first_of(choice) for choice in some or ()})
            if some is None:
                others.append(part)
                num_of_kind[_kind_of(part)] += 1
        rows = list[Int16Array]()
        mixed = {kind for kind in ("string", "number") if num_of_kind[kind] > 1}
        if "string" in mixed:
            rows.append(self._string({}, behind, is_exact=False))
        if "number" in mixed:
            rows.append(self._number({}, behind, is_exact=False))
        rows += [
            self._followed(part, behind, depth + 1)
            for part in others
            if _kind_of(part) not in mixed
        ]
        if some := [choice for choice in choices if _first_of(choice) not in mixed]:
            rows.append(self._builder.literals(dict.fromkeys(some, self._state(behind))))
        return functools.reduce(either, rows)

    def _object(self, schema: Schema, behind: Int16Array | None, depth: int) -> Int16Array:
        properties = schema.get("properties", {})
        required = frozenset(schema.get("required", ()))
        if schema.get("additionalProperties") is not False or not required <= properties.keys():
            raise UnfollowedPart
        build = self._builder
        close = build.byte(ord("}"), self._state(behind))
        after = close
        """Transitions behind the last property so far, from the last one to the first."""
        names = dict[bytes, int]()
        """State behind each name that may come next."""
        is_complete = True
        for name, part in reversed(properties.items()):
            value = self.row_of(part, self._gap(after), depth + 1)
            colon = build.byte(ord(":"), build.state(self._gap(value)))
            if name in required:
                names = {}
                is_complete = False
            names = {_literal(name): build.state(self._gap(colon))} | names
            first = build.literals(names)
            after = build.byte(ord(","), build.state(self._gap(first)))
            if is_complete:
                after = either(after, close)
        first = build.literals(names) if names else close
        if is_complete and names:
            first = either(first, close)
        return build.byte(ord("{"), build.state(self._gap(first)))

    def _array(self, schema: Schema, behind: Int16Array | None, depth: int) -> Int16Array:
        build = self._builder
        items = schema.get("items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        close = build.byte(ord("]"), self._state(behind))
        if most == 0:
            return build.byte(ord("["), build.state(self._gap(close)))
        num_followed = min(MAX_ITEMS, max(1, least) if most is None else most)
        if most == num_followed:
            more = nothing()
        elif most is None and least <= num_followed:
            # Any further item is like the last of these.
            repeated = build.reserve(1)
            more = build.byte(ord(","), repeated)
        else:
            more = build.byte(ord(","), LOST)
        row = nothing()
        for count in range(num_followed, 0, -1):
            after = either(more, close) if count >= least else more
            row = self.row_of(items, self._gap(after), depth + 1)
            if most is None and least <= num_followed == count:
                build.fill(repeated, self._gap(row))
            more = build.byte(ord(","), build.state(self._gap(row)))
        if not least:
            row = either(row, close)
        return build.byte(ord("["), build.state(self._gap(row)))

    def _gap(self, row: Int16Array) -> Int16Array:
        return self._builder.spaced(row) if self._has_spaces else row

    def _state(self, behind: Int16Array | None) -> int:
        return self._builder.end if behind is None else self._builder.state(behind)

    def _target(self, reference: object) -> object:
        """The part of the schema that a reference names."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnfollowedPart
        found: object = self._root
        for name in reference[1:].split("/")[1:]:
            if not isinstance(found, Mapping) or name not in found:
                raise UnfollowedPart
            found = found[name]
        return found


def _kind_of(schema: object) -> str:
    """Type of a schema; empty where it has none, or several."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in ("number", "integer"):
        return "number"
    return kind if isinstance(kind, str) else ""


def _first_of(choice: bytes) -> str:
    """Type of a value, by its first byte."""
    if choice.startswith(b'"'):
        return "string"
    return "number" if choice[:1] in b"-0123456789" else "literal"


def _choices(schema: Schema, keywords: Set[str]) -> list[bytes] | None:
    """Spellings of a schema that lists its values; None for other schemas."""
    kind = schema.get("type")
    if not keywords and kind in ("boolean", "null"):
        return [b"true", b"false"] if kind == "boolean" else [b"null"]
    if keywords not in ({"const"}, {"enum"}):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = {_KINDS.get(type(value)) for value in values}
    if not values or None in kinds or (kind is not None and kinds != {kind}):
        raise UnfollowedPart
    return [_literal(value) for value in values]


def _literal(value: object) -> bytes:
    """Spelling of a value that has one."""
    if isinstance(value, str) and (not value.isprintable() or '"' in value or "\\" in value):
        raise UnfollowedPart
    return json.dumps(value, ensure_ascii=False).encode()


def _bounds(schema: Schema) -> tuple[int | None, int | None]:
    least, most = schema.get("minimum"), schema.get("maximum")
    for bound in (least, most):
        if bound is not None and (type(bound) is not int or abs(bound) >= 10**_MOST_DIGITS):
            raise UnfollowedPart
    if least is not None and most is not None and least > most:
        raise UnfollowedPart
    return least, most
