"""Removes the line by which a coding agent says who it is from the beginning of a system prompt.

Claude Code (2.1.36 and later) puts it there, with a part that changes from request to request, so
that no prefix of a conversation would ever be found in a cache. It is meant for Anthropic's
servers.
"""

from __future__ import annotations

LINE = "x-anthropic-billing-header:"


def without_attribution(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(LINE) else text
