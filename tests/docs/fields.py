"""docs/fields.md, made from the structs that decode bodies: `python -m tests.docs.fields` writes
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from headwater.gateway.http.document import BODIES

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
HEAD = """# Fields of the API

Every field that a body may have, by endpoint, with what it may hold. Meanings, ranges and defaults are in
[api.md](api.md). Unknown fields are accepted and named in the log; known ones that are not served are refused by name.

`python -m tests.docs.fields` writes this page from the structs that decode bodies; a test compares the two.
"""
_WORDS = {
    inspect.AnyType: "any value",
    inspect.BoolType: "true or false",
    inspect.DictType: "an object",
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.ListType: "a list",
    inspect.StrType: "a string",
}


def page() -> str:
    objects: dict[str, type[msgspec.Struct]] = {}
    parts = [HEAD]
    for path, (kind, summary) in BODIES.items():
        parts.append(f"## POST {path}\n\n{summary}.\n\n{_table(kind, objects)}")
    parts.append("## Objects in bodies\n")
    shown: set[str] = set()
    while waiting := sorted(objects.keys() - shown):
        for name in waiting:
            shown.add(name)
            parts.append(f"### {name}\n\n{_table(objects[name], objects)}")
    return "\n".join(parts)


def _table(kind: type[Any], objects: dict[str, type[msgspec.Struct]]) -> str:
    """Table of a body's fields. Objects in them are added to `objects`."""
    told = inspect.type_info(kind)
    assert isinstance(told, inspect.StructType)
    rows = [
        f"| `{field.encode_name}` | {'yes' if field.required else ''} | "
        f"{_allowed(field.type, objects)} |"
        for field in told.fields
    ]
    return "\n".join(["| field | required | allowed |", "|---|---|---|", *rows]) + "\n"


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
            return "an object"
        case inspect.ListType(item_type=inner):
            return f"a list, each {_words(inner)}"
        case _:
            return _WORDS[type(kind)]


if __name__ == "__main__":
    PAGE.write_text(page())
