"""Base of request bodies, and the search for unknown fields in them, at any depth.

Decoding a `Body` fails at the first unknown field, so that a body without such fields costs nothing
more. For the others `known_part` returns the body without the unknown fields, and their places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from headwater.services.runtime.errors import BadRequest

MAX_UNKNOWN = 16_384
MAX_NAME_CHARS = 80
Unknown = list[tuple[str, Any]]
"""Places of unknown fields, as `messages[1].content[0].foo`, and their values."""
Copy = Callable[[Any, str, Unknown], Any]
"""Function that copies a value at a place, without its unknown fields."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request, or an object in it. Other structs that forbid unknown fields are no bodies: there
    the decoder's error stands."""


def known_part(value: Any, kind: Any, unknown: Unknown) -> Any:
    """Copies parsed JSON without the fields that `kind`, a type, does not have; these are added to
    `unknown`."""
    copy = _copy_of_kind(kind)
    return value if copy is None else copy(value, "", unknown)


@cache
def _copy_of_kind(kind: Any) -> Copy | None:
    return _copy_of(inspect.type_info(kind))


def _copy_of(kind: inspect.Type) -> Copy | None:
    """Copying function for a type; None: no body occurs in it."""
    match kind:
        case inspect.Metadata(type=inner):
            return _copy_of(inner)
        case inspect.UnionType(types=types):
            return _copy_of_union([copy for each in types if (copy := _copy_of(each)) is not None])
        case inspect.StructType(cls=cls, fields=fields) if issubclass(cls, Body):
            return _copy_of_body({field.encode_name: _copy_of(field.type) for field in fields})
        case inspect.ListType(item_type=inner, max_length=most):
            return _copy_of_list(_copy_of(inner), most)
        case _:
            return None


def _copy_of_union(members: list[Copy]) -> Copy | None:
    """Copying function for a union; the function of each member leaves values of other types
    alone."""

    def copy(value: Any, path: str, unknown: Unknown) -> Any:
        for member in members:
            value = member(value, path, unknown)
        return value

    return copy if len(members) > 1 else next(iter(members), None)


def _copy_of_list(item: Copy | None, most: int | None) -> Copy | None:
    def copy(value: Any, path: str, unknown: Unknown) -> Any:
        # The decoder refuses a list that is too long, so it is not copied.
        if not isinstance(value, list) or item is None or (most is not None and len(value) > most):
            return value
        return [item(each, f"{path}[{i}]", unknown) for i, each in enumerate(value)]

    return None if item is None else copy


def _copy_of_body(fields: dict[str, Copy | None]) -> Copy:
    def copy(value: Any, path: str, unknown: Unknown) -> Any:
        if not isinstance(value, dict):
            return value
        known = {}
        for name, each in value.items():
            if name not in fields:
                if len(unknown) == MAX_UNKNOWN:
                    raise BadRequest(
                        None,
                        f"the body has more than {MAX_UNKNOWN} unknown fields; allowed: "
                        f"{MAX_UNKNOWN}",
                    )
                unknown.append((f"{path}.{name[:MAX_NAME_CHARS]}".lstrip("."), each))
            elif (of_field := fields[name]) is None:
                known[name] = each
            else:
                known[name] = of_field(each, f"{path}.{name}".lstrip("."), unknown)
        return known

    return copy
