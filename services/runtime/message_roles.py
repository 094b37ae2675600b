"""Roles of a conversation's messages, the same for every surface."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_role(role: str, at: str, allowed: Iterable[str] = ROLES) -> None:
    """Checks the role of the message at a place. Raises `BadRequest`."""
    BadRequest.unless(role in allowed, f"{at}.role", role, ", ".join(allowed))
