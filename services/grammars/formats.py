"""Patterns of the formats of JSON Schema that llguidance takes too widely: its `date` has February
29 in every year, and its `time` and `date-time` have leap seconds in every minute."""

from __future__ import annotations

from collections.abc import Mapping

from .subschemas import Schema

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LAST_DAYS = "(?:0[13578]|1[02])-31|(?:0[469]|11)-30"
"""Last days of all months but February."""
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    f"{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LEAP_SECOND = r"23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)"
"""A leap second is the last second of a month in UTC. Those of other offsets are left out: they are
valid, but no answer needs them."""
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^(?:{_TIME}|{_LEAP_SECOND})$",
    "date-time": f"^(?:{_DATE}[tT]{_TIME}|[0-9]{{4}}-(?:{_LAST_DAYS})[tT]{_LEAP_SECOND})$",
}


def with_patterns(schema: Schema) -> Schema:
    """A subschema with a pattern in place of such a format."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return schema
    others = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    pattern = {"pattern": PATTERNS[name]}
    if "pattern" not in schema:
        return others | pattern
    all_of = schema.get("allOf", [])
    return others | {"allOf": [*all_of, pattern]} if isinstance(all_of, list) else schema
