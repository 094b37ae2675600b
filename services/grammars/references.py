"""Finds the subschemas that references of a JSON Schema name. Knows references into the same
document only."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any, TypeGuard


def is_local(reference: object) -> TypeGuard[str]:
    """Whether a `$ref` is a JSON pointer into its own document, and no id or anchor."""
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def target_of(root: object, reference: str) -> object:
    """Value at a local reference; None where there is nothing."""
    value: Any = root
    for written in urllib.parse.unquote(reference).split("/")[1:]:
        name = written.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return None
    return value


def _is_index(name: str) -> bool:
    return re.fullmatch("0|[1-9][0-9]{0,8}", name) is not None
