"""Hints of chats and completions on their cached blocks: a session, a time, and those that Dynamo's
clients send as `nvext.agent_hints`."""

from __future__ import annotations

from ..cache_hints import MAX_CACHE_PRIORITY, PERSON, TOOL, CacheHints
from .schema import Answering, ChatCompletionRequest

TOOL_ROLES = ("tool", "function")


def hints_of(asked: Answering) -> CacheHints:
    """The hints of a body. `agent_hints.priority` counts as Dynamo's: higher is more important,
    while the body's own `priority`, as vLLM's, only lowers a request in the queue."""
    given = asked.nvext.agent_hints if asked.nvext is not None else None
    priority = given.priority if given is not None else 0
    return CacheHints(
        session=asked.session_id or "",
        turn_kind=_kind_of(asked),
        priority=max(-MAX_CACHE_PRIORITY, min(priority, MAX_CACHE_PRIORITY)),
        keep_seconds=asked.cache_ttl_seconds or 0,
        expected_tokens=given.osl if given is not None else 0,
    )


def _kind_of(asked: Answering) -> str:
    if not isinstance(asked, ChatCompletionRequest) or not asked.messages:
        return ""
    return TOOL if asked.messages[-1].role in TOOL_ROLES else PERSON
