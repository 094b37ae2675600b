"""docs/fields.md, made from the structs that decode bodies: `python -m tests.docs.fields` writes
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from headwater.gateway.http.document import BODIES
from headwater.gateway.wire.body import Body

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
HEAD = """# Fields of the API

Every field that a body may have, by endpoint, with what it may hold. Meanings, ranges and defaults are in
[api.md](api.md). Unknown fields are accepted and named in the log; known ones that are not served are refused by name.

`python -m tests.docs.fields` writes this page from the structs that decode bodies; a test compares the two.
"""
_WORDS = {
    inspect.AnyType: "any value",
    inspect.BoolType: "boolean",
    inspect.DictType: "object",
    inspect.FloatType: "number",
    inspect.IntType: "integer",
    inspect.ListType: "list",
    inspect.StrType: "string",
}


def page() -> str:
    objects: dict[str, type[msgspec.Struct]] = {}
    parts = [HEAD]
    for kind, endpoints in _by_kind().items():
        paths = ", ".join(f"POST {path}" for path, _ in endpoints)
        parts.append(f"## {paths}\n\n{endpoints[0][1]}.\n\n{_table(kind, objects)}")
    parts.append("## Objects in bodies\n")
    shown: set[str] = set()
    while waiting := sorted(objects.keys() - shown):
        for name in waiting:
            shown.add(name)
            parts.append(f"### {name}\n\n{_table(objects[name], objects)}")
    return "\n".join(parts)


def _by_kind() -> dict[type[msgspec.Struct], list[tuple[str, str]]]:
    """Path and summary of the endpoints of each body."""
    found: dict[type[msgspec.Struct], list[tuple[str, str]]] = {}
    for path, (kind, summary) in BODIES.items():
        found.setdefault(kind, []).append((path, summary))
    return found


def _shared_base(kind: type[Any]) -> type[Any] | None:
    """The nearest base that other bodies have too, whose fields are shown once."""
    for base in kind.__mro__[1:]:
        heirs = [other for other in _by_kind() if issubclass(other, base)]
        if issubclass(base, Body) and base.__struct_fields__ and len(heirs) > 1:
            return base
    return None


def _fields(kind: type[Any]) -> dict[str, inspect.Field]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field for field in info.fields}


def _table(kind: type[Any], objects: dict[str, type[msgspec.Struct]]) -> str:
    """Table of the fields that a body does not share with others. Objects in them, and what it
    shares, are added to `objects`."""
    base = _shared_base(kind)
    inherited = {} if base is None else _fields(base)
    rows = [
        f"| `{name}`{' (required)' if field.required else ''} | {_allowed(field.type, objects)} |"
        for name, field in _fields(kind).items()
        if inherited.get(name) != field
    ]
    more = "" if base is None else f"\nAlso the fields of {_anchor(base, objects)}.\n"
    return "\n".join(["| field | allowed |", "|---|---|", *rows]) + "\n" + more


def _allowed(kind: inspect.Type, objects: dict[str, type[msgspec.Struct]]) -> str:
    names = sorted({_anchor(each, objects) for each in _bodies_in(kind)})
    text = _description(kind) or _words(kind)
    # A field takes null for "not given", which every field does.
    whole = text.replace("|", "&#124;")
    return whole + (f" ({', '.join(names)})" if names else "")


def _anchor(body: type[msgspec.Struct], objects: dict[str, type[msgspec.Struct]]) -> str:
    """Link to the table of an object. Objects of the same name differ by API."""
    api = body.__module__.split(".")[2]
    name = body.__name__ if api == "openai" else f"{body.__name__} of {api}"
    if body.__module__.endswith("openai.response_schema"):
        name = f"{body.__name__} of responses"
    assert objects.setdefault(name, body) is body, f"two objects are called {name}"
    return f"[{name}](#{name.lower().replace(' ', '-')})"


def _bodies_in(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from _bodies_in(inner)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _bodies_in(each)
        case inspect.ListType(item_type=inner):
            yield from _bodies_in(inner)
        case inspect.StructType(cls=cls):
            yield cls


def _description(kind: inspect.Type) -> str:
    """The words of a field about what it may hold; empty: it has none."""
    match kind:
        case inspect.Metadata(extra_json_schema=extra, type=inner):
            return (extra or {}).get("description", "") or _description(inner)
        case inspect.UnionType(types=types):
            return next(filter(None, map(_description, types)), "")
        case _:
            return ""


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return _words(inner)
        case inspect.UnionType(types=types):
            return " or ".join(_words(each) for each in types if each != inspect.NoneType())
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
        case inspect.StructType():
            return "object"
        case inspect.ListType(item_type=inner):
            return f"list, each {_words(inner)}"
        case _:
            return _WORDS[type(kind)]


if __name__ == "__main__":
    PAGE.write_text(page())
