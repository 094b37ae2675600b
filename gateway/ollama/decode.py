"""Bodies of Ollama's API, decoded. Unknown fields are named in the log; those that would change the
answer are refused by name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..wire import decode as wire
from .not_served import check_served

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decodes a body. Raises `BadRequest`. Unknown fields are accepted at any depth, and named in
    the log once: options of Ollama's runners are such fields."""
    return wire.decode(body, kind, _is_without_effect)


def _is_without_effect(field: wire.UnknownField) -> bool:
    """Whether the field is known and has a value without effect. Raises `UnsupportedField` for
    another value."""
    return check_served(field.name, field.path, field.value)
