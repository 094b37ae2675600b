"""Reads files of JSON that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises `ConfigError` where there is none that can be read."""
    found = _read(path)
    if not isinstance(found, dict):
        raise ConfigError(path.name, str(path.parent), "a folder with one that is an object")
    return found


def read_array(path: Path) -> list[Any]:
    """The array in a file. Raises `ConfigError` where there is none that can be read."""
    found = _read(path)
    if not isinstance(found, list):
        raise ConfigError(path.name, str(path.parent), "a folder with one that is an array")
    return found


def _read(path: Path) -> object:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = _reason(error)
        raise ConfigError(
            path.name, str(path.parent), f"a folder with one that can be read ({why})"
        ) from None
    return found


def _reason(error: Exception) -> str:
    """Message of an error without quotations from the file, which may be a link to another file."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of it is not UTF-8"
    # The system's own words: Python adds the path to them.
    return str(error.strerror) if isinstance(error, OSError) else str(error)
