"""Turns the oneOf of a JSON Schema into an anyOf where no value can match two of its members.

llguidance tells members apart by their types and by constants that are strings. They are told apart
here by constants of any type, in the members themselves or in a property that all of them require.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .references import is_local, target_of

Schema = dict[str, Any]
Member = Sequence[Schema]
"""Subschemas that apply together: a member's own, those that it references, and those around it. A
missing one only makes members harder to tell apart."""
Constants = dict[str, set[str]]
"""Values that a member allows, as texts, by the name of their type."""
MAX_WORK = 200_000
"""Largest number of subschemas and values that are looked at, some tenths of a second: by
references a short schema can name the same ones over and over. Further oneOf stay as they are."""
_TYPES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
}
_ALL_TYPES = frozenset(["boolean", "number", "string", "null", "array", "object"])


def turn_into_any_of(root: Schema, subschemas: Sequence[Schema]) -> None:
    """Changes the subschemas of `root` in place."""
    # References below an id are relative to it.
    if any("$id" in part for part in subschemas if part is not root):
        return
    reader = _Reader(root)
    for part in subschemas:
        members = part.get("oneOf")
        all_of = part.get("allOf", [])
        if (
            isinstance(members, list)
            and isinstance(all_of, list)
            and reader.distinguishes(part, members)
        ):
            del part["oneOf"]
            part.update(
                {"allOf": [*all_of, {"anyOf": members}]} if "anyOf" in part else {"anyOf": members}
            )


class _Reader:
    """Tells members apart, within the work of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work_left = MAX_WORK
        self._known_constants: dict[int, Constants] = {}
        """Constants by the identity of their subschema."""

    def distinguishes(self, parent: Schema, members: Sequence[object]) -> bool:
        """Whether no value matches two of the members. `parent` has them as its `oneOf`, and holds
        for each."""
        try:
            around = list(self._together([parent]))
            return self._differ(
                [[*self._together([member]), *self._charged(around)] for member in members]
            )
        except _TooMuchWork:
            return False

    def _charge(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise _TooMuchWork

    def _charged(self, member: Member) -> Member:
        self._charge(len(member))
        return member

    def _together(self, schemas: Sequence[object]) -> Iterator[Schema]:
        """The subschemas, and those that apply to the same value as they do."""
        waiting = list(schemas)
        seen = set[int]()
        while waiting:
            part = waiting.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            self._charge(1)
            seen.add(id(part))
            yield part
            if is_local(reference := part.get("$ref")):
                waiting.append(target_of(self._root, reference))
            if isinstance(all_of := part.get("allOf"), list):
                waiting += all_of

    def _differ(self, members: Sequence[Member], *, by_property: bool = True) -> bool:
        """Whether no value matches two of the members."""
        by_type = defaultdict(list)
        for member in members:
            for name in self._types(member):
                by_type[name].append(member)
        return all(
            len(those) == 1
            or self._have_different_constants(those, name)
            or (name == "object" and by_property and self._differ_in_a_property(those))
            for name, those in by_type.items()
        )

    def _have_different_constants(self, members: Sequence[Member], type_name: str) -> bool:
        seen = set[str]()
        for member in members:
            constants = self._constants(member)
            if constants is None or not seen.isdisjoint(constants[type_name]):
                return False
            seen |= constants[type_name]
        return True

    def _differ_in_a_property(self, members: Sequence[Member]) -> bool:
        """Whether objects that match two of the members would need two values of a property."""
        names = dict.fromkeys(name for part in members[0] for name in _properties(part))
        return any(self._differ_in(name, members) for name in names)

    def _differ_in(self, name: str, members: Sequence[Member]) -> bool:
        self._charge(len(members))
        for member in members:
            if not any(name in self._charged_required(part) for part in member):
                return False
        values = [
            list(
                self._together(
                    [_properties(part)[name] for part in member if name in _properties(part)]
                )
            )
            for member in members
        ]
        return self._differ(values, by_property=False)

    def _charged_required(self, part: Schema) -> list[object]:
        required = part.get("required")
        self._charge(len(required) if isinstance(required, list) else 0)
        return required if isinstance(required, list) else []

    def _types(self, member: Member) -> set[str]:
        """Names of the types of values that may match; an integer is a number."""
        constants = self._constants(member)
        if constants is not None:
            return set(constants)
        declared = next((part["type"] for part in member if "type" in part), None)
        names = declared if isinstance(declared, list) else [declared]
        known = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        return known & _ALL_TYPES or set(_ALL_TYPES)

    def _constants(self, member: Member) -> Constants | None:
        """Values that alone may match; None where others may."""
        for part in member:
            if "const" in part or isinstance(part.get("enum"), list):
                if id(part) not in self._known_constants:
                    self._known_constants[id(part)] = _constants_of(part)
                constants = self._known_constants[id(part)]
                self._charge(sum(map(len, constants.values())))
                return constants
        return None


class _TooMuchWork(Exception):
    """Raised where a schema takes more than `MAX_WORK`."""


def _properties(part: Schema) -> Schema:
    properties = part.get("properties")
    return properties if isinstance(properties, dict) else {}


def _constants_of(part: Schema) -> Constants:
    constants = defaultdict[str, set[str]](set)
    for value in [part["const"]] if "const" in part else part["enum"]:
        constants[_TYPES.get(type(value), "object")].add(json.dumps(_plain(value), sort_keys=True))
    return dict(constants)


def _plain(value: object) -> object:
    """The value, so that equal values have the same text: to JSON Schema 1.0 is 1, and true is
    not."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(each) for each in value]
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case _:
            return value
