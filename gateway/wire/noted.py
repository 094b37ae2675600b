"""Names in the log, once each, parts of requests that have no effect."""

from __future__ import annotations

from typing import Any

import structlog

MAX_NOTED = 1000
"""Largest number of different names that the log gets, since clients choose them."""
_noted: set[tuple[str, str]] = set()


def note(event: str, name: str, **fields: Any) -> None:
    """Writes a warning with these fields, unless the event was written for that name before."""
    if (event, name) not in _noted and len(_noted) < MAX_NOTED:
        _noted.add((event, name))
        structlog.get_logger().warning(event, **fields)
