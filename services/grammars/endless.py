"""Finds the subschemas of a JSON Schema that no finite value matches, as a schema that requires
itself within itself: a least fixed point over its references.

A value must match several subschemas at once where `allOf`, a `$ref` or `anyOf` stands beside other
keywords. So the states of the search are sets of subschemas, and each has *ways* to be matched: the
sets of states that the parts of a value have. What no way can match is never assumed of leaves,
such as a pattern that excludes itself: the compiler finds these.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from .name_pattern import NamePattern, name_pattern
from .references import is_local, target_of
from .subschemas import Schema, Subschema, subschemas

Key = TypeVar("Key", bound=Hashable)
State = frozenset[int]
"""Subschemas that a value matches together, by identity."""
Way = frozenset[State]
"""States of the parts of a value, all of which must be matched."""
Waiting = list[tuple[object, State]]
"""Subschemas, each with the path of subschemas that led to it."""
Choices = list[tuple[list[object], State]]
"""Members of an `anyOf` or `oneOf`, with the subschemas that led to it."""
_NEVER: State = frozenset((-1,))
"""State of the schema `false`."""
_ENDS: Way = frozenset()
_LEAVES = frozenset(("null", "boolean", "number", "integer", "string"))
_TYPES = (*sorted(_LEAVES), "array", "object")
_BOUNDS = (
    ("minLength", "maxLength"),
    ("minimum", "maximum"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
_LEAST_WORK = 500
_WORK_PER_SUBSCHEMA = 8
"""Limit of the search, some microseconds each: alternatives of alternatives grow without
bounds. Beyond it nothing is found."""
_WORK_PER_CHAR = 8
"""Work of matching a name with a pattern."""


def endless(root: Schema) -> frozenset[int]:
    """Identities of the subschemas that no finite value matches."""
    parts = list(subschemas(root))
    if not _is_cyclic(parts):
        return frozenset()
    singles = {id(each.schema): frozenset((id(each.schema),)) for each in parts}
    search = _Search(parts)
    try:
        matched = least_fixed_point(search.all_ways(singles.values()))
    except _TooMuchWork:
        return frozenset()
    return frozenset(key for key, state in singles.items() if state not in matched)


def least_fixed_point(ways: Mapping[Key, Sequence[frozenset[Key]]]) -> set[Key]:
    """The smallest set that has each key with an alternative whose keys are all in the set."""
    users = defaultdict[Key, list[tuple[Key, int]]](list)
    missing: dict[tuple[Key, int], int] = {}
    ready: list[Key] = []
    for state, those in ways.items():
        for i, way in enumerate(those):
            missing[state, i] = len(way)
            for part in way:
                users[part].append((state, i))
            if not way:
                ready.append(state)
    matched = set[Key]()
    while ready:
        state = ready.pop()
        if state in matched:
            continue
        matched.add(state)
        for user in users[state]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user[0])
    return matched


def _is_cyclic(parts: Sequence[Subschema]) -> bool:
    """Whether a reference leads, directly or through others, to a subschema that contains it. A
    schema without such a reference is finite."""
    index = {id(each.schema): i for i, each in enumerate(parts)}
    links = [
        (i, index[id(target)])
        for i, each in enumerate(parts)
        if is_local(link := each.schema.get("$ref"))
        and id(target := target_of(each.base, link)) in index
    ]
    ends = _ends(parts)
    following = set[int]()
    done = set[int]()
    waiting = [(target, False) for _, target in links]
    while waiting:
        target, is_left = waiting.pop()
        if is_left:
            following.remove(target)
            done.add(target)
        elif target in following:
            return True
        elif target not in done:
            following.add(target)
            waiting.append((target, True))
            first = bisect.bisect_left(links, (target, 0))
            behind = bisect.bisect_left(links, (ends[target], 0))
            waiting += [(inner, False) for _, inner in links[first:behind]]
    return False


def _ends(parts: Sequence[Subschema]) -> list[int]:
    """Position behind the last subschema in each: they come before their parts."""
    ends = [len(parts)] * len(parts)
    above = list[int]()
    for i, each in enumerate(parts):
        while above and parts[above[-1]].depth >= each.depth:
            ends[above.pop()] = i
        above.append(i)
    return ends


class _TooMuchWork(Exception):
    """Raised beyond the limit of the search."""


class _Search:
    def __init__(self, parts: Sequence[Subschema]) -> None:
        self._schemas = {id(each.schema): each.schema for each in parts}
        self._bases = {id(each.schema): each.base for each in parts}
        self._patterns: dict[str, NamePattern | None] = {}
        self._work_left = _LEAST_WORK + _WORK_PER_SUBSCHEMA * len(parts)

    def all_ways(self, states: Iterable[State]) -> dict[State, list[Way]]:
        """Ways of the states, and of all states that these lead to."""
        ways: dict[State, list[Way]] = {_NEVER: []}
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in ways:
                continue
            ways[state] = self._ways(state)
            waiting += {part for way in ways[state] for part in way}
        return ways

    def _ways(self, state: State) -> list[Way]:
        ways = list[Way]()
        for parts in self._alternatives(state):
            for way in self._ways_of(parts):
                if way == _ENDS:
                    return [_ENDS]
                ways.append(way)
        return ways

    def _alternatives(self, state: State) -> Iterator[list[Schema]]:
        """The state's subschemas with those that they refer to, for each choice of members."""
        first: Waiting = [(self._schemas[key], frozenset()) for key in state]
        stack: list[tuple[Waiting, list[Schema], Choices]] = [(first, [], [])]
        while stack:
            waiting, parts, choices = stack.pop()
            if not self._follow(waiting, parts, choices):
                continue
            if not choices:
                yield parts
                continue
            members, above = choices.pop()
            stack += [([(each, above)], list(parts), list(choices)) for each in members]

    def _follow(self, waiting: Waiting, parts: list[Schema], choices: Choices) -> bool:
        """Adds the waiting subschemas, and all that a value must match together with them, to
        `parts`. Returns whether a value may match: none matches `false`, or a reference that leads
        back to itself."""
        while waiting:
            part, above = waiting.pop()
            self._charge(1)
            if part is False or id(part) in above:
                return False
            if not isinstance(part, dict):
                continue
            parts.append(part)
            above = above | {id(part)}
            if is_local(reference := part.get("$ref")):
                base = self._bases.get(id(part))
                waiting.append((target_of(base, reference), above))
            if isinstance(all_of := part.get("allOf"), list):
                waiting += [(each, above) for each in all_of]
            for keyword in ("anyOf", "oneOf"):
                if isinstance(members := part.get(keyword), list):
                    choices.append((members, above))
        return True

    def _ways_of(self, parts: Sequence[Schema]) -> Iterator[Way]:
        """Ways of values that match all the subschemas, by the type of the value."""
        constants = [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
        if constants or any("const" in part for part in parts):
            yield from [_ENDS] if all(constants) else []
            return
        if any(_is_crossed(parts, *bounds) for bounds in _BOUNDS):
            return
        types = _types(parts)
        if types & _LEAVES:
            yield _ENDS
        elif "array" in types and (way := self._items(parts)) is not None:
            yield way
        if not types & _LEAVES and "object" in types:
            yield from self._properties(parts)

    def _items(self, parts: Sequence[Schema]) -> Way:
        """Way of an array with the least number of items."""
        least = _largest(parts, "minItems")
        num_listed = max(len(_listed(part)) for part in parts)
        return frozenset(
            self._state(_item(part, i) for part in parts) for i in range(min(least, num_listed + 1))
        )

    def _properties(self, parts: Sequence[Schema]) -> Iterator[Way]:
        """Ways of an object with the required properties, and one more where that is not enough."""
        names = dict.fromkeys(name for part in parts for name in _required(part))
        required = frozenset(
            self._state(each for part in parts for each in self._named(part, name))
            for name in names
        )
        if _largest(parts, "minProperties") <= len(names):
            yield required
            return
        others = dict.fromkeys(name for part in parts for name in _map(part, "properties"))
        for name in others.keys() - names.keys():
            yield required | {
                self._state(each for part in parts for each in self._named(part, name))
            }
        for part in parts:
            for schema in _map(part, "patternProperties").values():
                yield required | {self._state([schema])}
        yield required | {self._state(part.get("additionalProperties", True) for part in parts)}

    def _named(self, part: Schema, name: str) -> Iterator[object]:
        """Subschemas of the part that hold for a property."""
        self._charge(1)
        is_named = name in _map(part, "properties")
        if is_named:
            yield part["properties"][name]
        for pattern, schema in _map(part, "patternProperties").items():
            self._charge(_WORK_PER_CHAR * len(name))
            known = self._pattern(pattern)
            # An expression that cannot be read here may match: then others do not hold.
            if known is None or known.matches(name):
                is_named = True
            if known is not None and known.matches(name):
                yield schema
        if not is_named:
            yield part.get("additionalProperties", True)

    def _pattern(self, expression: str) -> NamePattern | None:
        """The expression, which is read once for the schema; see `name_pattern`."""
        if expression not in self._patterns:
            self._patterns[expression] = name_pattern(expression)
        return self._patterns[expression]

    def _state(self, schemas: Iterable[object]) -> State:
        together = list(schemas)
        self._charge(len(together))
        if any(each is False for each in together):
            return _NEVER
        return frozenset(id(each) for each in together if id(each) in self._schemas)

    def _charge(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise _TooMuchWork


def _types(parts: Sequence[Schema]) -> set[str]:
    """Types that all the subschemas allow. A value of no type is left to the compiler."""
    types = set(_TYPES)
    for part in parts:
        declared = part.get("type", _TYPES)
        types &= {declared} if isinstance(declared, str) else set(map(str, declared))
    return types


def _is_crossed(parts: Sequence[Schema], least: str, most: str) -> bool:
    return any(
        isinstance(low := part.get(least), int | float)
        and isinstance(high := part.get(most), int | float)
        and low > high
        for part in parts
    )


def _largest(parts: Sequence[Schema], keyword: str) -> int:
    return max(value if isinstance(value := part.get(keyword), int) else 0 for part in parts)


def _listed(part: Schema) -> list[object]:
    """Subschemas of the first items: older drafts have them in `items`."""
    for keyword in ("prefixItems", "items"):
        if isinstance(listed := part.get(keyword), list):
            return listed
    return []


def _item(part: Schema, i: int) -> object:
    listed = _listed(part)
    if i < len(listed):
        return listed[i]
    others = "additionalItems" if isinstance(part.get("items"), list) else "items"
    return part.get(others, True)


def _required(part: Schema) -> list[str]:
    required = part.get("required")
    return list(map(str, required)) if isinstance(required, list) else []


def _map(part: Schema, keyword: str) -> Schema:
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}
