"""Schemas and regular expressions that cost a compiler of grammars more than their bytes suggest.

`idx` is a number that makes each one new, so that no verdict on an earlier one answers it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _overlapping_patterns(count: int, idx: int) -> Schema:
    """Overlapping patterns of names, which a compiler joins in one automaton whose size grows
    exponentially with their number."""
    patterns: Schema = {f"^[a-z]{{{i},{i + 1}}}x{i}.*y{idx}$": {} for i in range(count)}
    return {"patternProperties": patterns}


def exploding_schema(idx: int) -> Schema:
    """A schema that a checker of grammars gives up after the CPU seconds that one may take."""
    return _overlapping_patterns(300, idx)


def slow_schema(idx: int) -> Schema:
    """A good schema whose compilation takes about half a second of a core."""
    return _overlapping_patterns(85, idx)


def endless_schema(idx: int) -> Schema:
    """A schema whose values are infinitely nested."""
    name = f"child{idx}"
    return {
        "type": "object",
        "properties": {name: {"$ref": "#"}},
        "required": [name],
        "additionalProperties": False,
    }


def large_enum(idx: int, count: int = 10_000) -> Schema:
    return {"enum": [f"value {idx} {i}" for i in range(count)]}


def many_alternatives(idx: int, count: int = 2000) -> Schema:
    """Alternatives that are objects with different names."""
    return {
        "anyOf": [
            {"type": "object", "properties": {f"k{idx}-{i}": {"const": i}}} for i in range(count)
        ]
    }


def bad_regex(idx: int) -> str:
    """A regular expression with a group that is not closed, behind a long good part."""
    return f"({'[a-z]{1,40}' * 200}{idx}"


def exploding_regex(idx: int) -> str:
    """Repetitions in each other, which together make a million states."""
    return f"((a{{0,100}}b{idx}){{0,100}}){{0,100}}"


def backtracking_regex(idx: int) -> str:
    """Repetitions that split the same text in exponentially many ways."""
    return f"((x+x+)+y){{20}}{idx}"
