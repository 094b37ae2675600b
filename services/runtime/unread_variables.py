"""Variables of the environment that look like settings and are none: a mistyped name would be
ignored silently."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import structlog

from .known_variables import KNOWN
from .process import PARENT_FD

PREFIX = "HEADWATER_"


def unread_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that no part of the project reads, with the known name that is
    nearest."""
    return [
        _sentence(name) for name in sorted(env) if name.startswith(PREFIX) and name not in KNOWN
    ]


def warn_of_unread_variables(env: Mapping[str, str] = os.environ) -> None:
    """Logs a warning for each of them, once a cluster: stages under a supervisor leave it to the
    supervisor."""
    if PARENT_FD not in env:
        for sentence in unread_variables(env):
            structlog.get_logger().warning(sentence)


def _sentence(name: str) -> str:
    nearest = difflib.get_close_matches(
        name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in KNOWN], n=1
    )
    hint = (
        f"did you mean {PREFIX}{nearest[0]}?"
        if nearest
        else "docs/configuration.md lists those that are read"
    )
    return f"{name} is set, and nothing reads a variable of this name; {hint}"
