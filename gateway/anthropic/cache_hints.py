"""`cache_control` of Anthropic's bodies, as hints on the prompt's cached blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..cache_hints import PERSON, TOOL, CacheHints
from .schema import MessagesRequest

KEEP_SECONDS = {"5m": 300, "1h": 3600}
DEFAULT_TTL = "5m"


def hints_of(asked: MessagesRequest) -> CacheHints:
    """Hints of a body. The longest time that any block names counts for the whole prompt."""
    keep_seconds = max(map(_seconds_of, _controls(asked)), default=0)
    content = asked.messages[-1].content
    is_result = not isinstance(content, str) and any(
        block.type == "tool_result" for block in content
    )
    return CacheHints(turn_kind=TOOL if is_result else PERSON, keep_seconds=keep_seconds)


def _controls(asked: MessagesRequest) -> Iterator[Any]:
    """All `cache_control` values of a body."""
    yield asked.cache_control
    for tool in asked.tools or ():
        yield tool.cache_control
    texts = [asked.system, *(message.content for message in asked.messages)]
    for text in texts:
        if isinstance(text, list):
            for block in text:
                yield block.cache_control


def _seconds_of(control: Any) -> int:
    """Time that a `cache_control` asks for; other values than Anthropic's ask for none."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return 0
    ttl = control.get("ttl", DEFAULT_TTL)
    return KEEP_SECONDS.get(ttl, 0) if isinstance(ttl, str) else 0
