"""Rewrites what libraries of clients write into JSON Schemas, and llguidance does not read, as what
means the same: formats that restrict nothing, patterns that look ahead, names of properties as an
enumeration, and unions whose members are told apart by a tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .references import is_local, target_of

ANNOTATION_FORMATS = frozenset(
    (
        *("password", "path", "file-path", "directory-path", "binary", "byte", "base64url"),
        *("int32", "int64", "float", "double", "decimal"),
        *("uri-reference", "iri-reference", "json-string", "multi-host-uri"),
    )
)
"""`format` values of OpenAPI and pydantic that only describe what a value is for."""
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


def respell(root: dict[str, Any], part: dict[str, Any]) -> None:
    """Rewrites a subschema of `root` in place."""
    if part.get("format") in ANNOTATION_FORMATS:
        del part["format"]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        part["pattern"] = SAME_PATTERNS.get(pattern, pattern)
    _name_properties(part)
    _require_tags(root, part)


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


def _require_tags(root: dict[str, Any], part: dict[str, Any]) -> None:
    """Requires the property by which an OpenAPI `discriminator` tells members apart. pydantic
    writes a constant with a default as optional, but needs it when it reads the object."""
    discriminator = (
        part.pop("discriminator", None) if isinstance(part.get("discriminator"), dict) else None
    )
    name = discriminator.get("propertyName") if discriminator is not None else None
    members = part.get("oneOf", part.get("anyOf"))
    for member in members if isinstance(name, str) and isinstance(members, list) else ():
        found = _target(root, member)
        properties = found.get("properties")
        required = found.get("required", [])
        if isinstance(properties, dict) and name in properties and isinstance(required, list):
            found["required"] = [*required, *([name] if name not in required else [])]


def _target(root: dict[str, Any], member: object) -> dict[str, Any]:
    """The subschema of a member, or the one that it names; empty for anything else."""
    reference = member.get("$ref") if isinstance(member, dict) else None
    found = target_of(root, reference) if is_local(reference) else member
    return found if isinstance(found, dict) else {}
