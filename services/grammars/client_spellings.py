"""Rewrites what libraries of clients write into JSON Schemas, and llguidance does not read, as what means
the same: formats that restrict nothing, patterns that look ahead, and names of properties as an
enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATION_FORMATS = frozenset(
    (
        *("password", "path", "file-path", "directory-path", "binary", "byte", "base64url"),
        *("int32", "int64", "float", "double", "decimal"),
        *("uri-reference", "iri-reference", "json-string", "multi-host-uri"),
    )
)
"""Formats of OpenAPI and of pydantic that say what a value is for."""
_EMAIL_HOST = r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}"
_EMAIL_CHARS = r"[A-Za-z0-9_'+\-]"
SAME_PATTERNS: Mapping[str, str] = {
    # zod's `z.email()`: dots neither begin the local part nor follow one another.
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@{_EMAIL_HOST}$": (
        rf"^({_EMAIL_CHARS}+\.)*{_EMAIL_CHARS}*[A-Za-z0-9_+-]@{_EMAIL_HOST}$"
    ),
    # pydantic's `Decimal`: at least one digit.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
"""Patterns without look-ahead, by the patterns that match the same texts."""


def respell(part: dict[str, Any]) -> None:
    """Rewrites a subschema in place."""
    if part.get("format") in ANNOTATION_FORMATS:
        del part["format"]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        part["pattern"] = SAME_PATTERNS.get(pattern, pattern)
    _name_properties(part)


def _name_properties(part: dict[str, Any]) -> None:
    """Writes `propertyNames` that enumerates names, as of pydantic's `dict[Literal[…], …]`, as
    properties."""
    names = part.get("propertyNames")
    values = names.get("enum", [names.get("const")]) if isinstance(names, dict) else None
    is_alone = isinstance(names, dict) and names.keys() <= {"enum", "const", "type", "title"}
    if not is_alone or "properties" in part or "patternProperties" in part:
        return
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        return
    value = part.get("additionalProperties", True)
    del part["propertyNames"]
    part["properties"] = dict.fromkeys(values, value)
    part["additionalProperties"] = False
