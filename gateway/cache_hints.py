"""Hints of a client on how long its prompt's cached blocks are worth keeping. They change no
answer, and never take from another tenant's share of the cache."""

from __future__ import annotations

import msgspec

TOOL = "tool"
PERSON = "person"
TOOL_ROLES = ("tool", "function")
MAX_KEEP_SECONDS = 86_400
MAX_CACHE_PRIORITY = 8
MAX_SESSION_LEN = 256
"""Characters of a session's name."""


class CacheHints(msgspec.Struct, frozen=True, kw_only=True):
    """Hints of one request."""

    session: str = ""
    """Name of the conversation within its tenant; empty: not known."""
    turn_kind: str = ""
    """TOOL or PERSON: who wrote the last message; empty: not known."""
    priority: int = 0
    """Steps by which the blocks' value is doubled, or halved where it is negative."""
    keep_seconds: int = 0
    """Seconds for which the blocks are kept before others of the tenant."""
    expected_tokens: int = 0
    """Length of the answer as the client expects it; 0: it does not say."""


NO_HINTS = CacheHints()


def bounded_priority(priority: int) -> int:
    return max(-MAX_CACHE_PRIORITY, min(priority, MAX_CACHE_PRIORITY))


def kind_of_role(role: str) -> str:
    """Kind of a turn by the role of its last message."""
    return TOOL if role in TOOL_ROLES else PERSON
