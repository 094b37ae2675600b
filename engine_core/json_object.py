"""Reads files of JSON that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises `ConfigError` where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # The system's own words: Python adds the path to them.
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            path.name, str(path.parent), f"a folder with one that can be read ({why})"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(path.name, str(path.parent), "a folder with one that is an object")
    return found
