"""Checks which keywords of a JSON Schema are enforced, before it is compiled. Knows no grammar."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from ..runtime.client_json import read_json
from ..runtime.errors import BadRequest
from .client_spellings import respell
from .one_of import turn_into_any_of
from .subschemas import subschemas
from .unique_items import list_unique_arrays

MAX_NESTING = 64
MAX_OPTIONAL = 480
"""Largest number of optional properties in a row: each may come next, and takes four of the
compiler's `max_items_in_row`, which an answer would meet only on its way."""
NOT_ENFORCED = frozenset(
    [
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    ]
)
"""Keywords that restrict valid values and that a grammar cannot express."""
SAY_NOTHING: Mapping[str, object] = {
    **{
        "uniqueItems": False,
        "unevaluatedItems": True,
        "unevaluatedProperties": True,
        "propertyNames": True,
    },
    **{
        "minContains": 0,
        "not": False,
        "dependentSchemas": {},
        "dependentRequired": {},
        "dependencies": {},
    },
}
"""Values, by keyword, with which generators write these keywords to allow everything."""


def parse_json(param: str, text: str) -> Any:
    """Parses JSON. Raises `BadRequest` for invalid JSON and for JSON that is nested too deeply."""
    try:
        value = read_json(text, param)
    except (msgspec.DecodeError, UnicodeError) as fault:
        raise BadRequest(param, f"{param} is not valid JSON: {fault}") from None
    if _nesting(value) > MAX_NESTING:
        raise BadRequest(
            param, f"{param} is nested {_nesting(value)} deep; allowed: at most {MAX_NESTING}"
        )
    return value


def check_schema(param: str, schema: object) -> None:
    """Raises `BadRequest` naming the first keyword that would be accepted but not enforced, and its
    place.

    Changes the schema to what the compiler knows: removes keywords without effect, rewrites
    clients' spellings, and writes a `oneOf` as `anyOf` where that is the same.
    """
    if not isinstance(schema, dict):
        raise BadRequest.of(param, schema, "a JSON Schema that is an object")
    parts = [(each.path, each.schema) for each in subschemas(schema)]
    for path, part in parts:
        respell(schema, part)
        list_unique_arrays(schema, part)
        for keyword in [each for each in part if each in NOT_ENFORCED]:
            if keyword not in SAY_NOTHING or not _is_same(part[keyword], SAY_NOTHING[keyword]):
                raise _not_enforced(param, path, keyword, "no grammar can hold an answer to it")
            del part[keyword]
        # Keys that are not listed may come twice, and twice the same key is one property.
        least = part.get("minProperties", 0)
        required = part.get("required")
        # Older schemas say `"required": true` of a property.
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > 1 + num_required:
            raise _not_enforced(
                param, path, "minProperties", "at most one more than `required` can be held to"
            )
        if (num_optional := _most_optional(part)) > MAX_OPTIONAL:
            raise BadRequest(
                param,
                f"{param} has {num_optional} optional properties in a row at "
                f"{path or 'the top level'}; allowed: at most {MAX_OPTIONAL}",
                code="unsupported_schema",
            )
    turn_into_any_of(schema, [part for _, part in parts])


def _most_optional(part: dict[str, Any]) -> int:
    """Largest number of optional properties without a required one between them."""
    properties = part.get("properties")
    required = part.get("required")
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
        return 0
    names = (
        {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    )
    runs = itertools.groupby(properties, key=lambda name: name in names)
    return max((len(list(run)) for is_required, run in runs if not is_required), default=0)


def _is_same(value: object, other: object) -> bool:
    """Whether values are equal in JSON: neither 0 nor 1 is a truth value."""
    return type(value) is type(other) and value == other


def _not_enforced(param: str, path: str, keyword: str, why: str) -> BadRequest:
    where = path or "the top level"
    message = f"{param} uses the keyword {keyword!r} at {where}, which is not supported: {why}"
    return BadRequest(param, message, code="unsupported_schema")


def _nesting(value: Any) -> int:
    """Depth of lists and objects, counted without recursion."""
    depth = 0
    level = [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth
