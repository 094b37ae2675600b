"""Hints of chats, completions and responses on their cached blocks: a session, a time, and those
that Dynamo's clients send as `nvext.agent_hints`."""

from __future__ import annotations

from ..cache_hints import PERSON, TOOL, CacheHints, bounded_priority, kind_of_role
from .response_schema import ResponsesRequest
from .schema import ChatCompletionRequest, Hinted

OUTPUTS = "_output"
"""End of the types of items that are results of tools."""


def hints_of(asked: Hinted) -> CacheHints:
    """The hints of a body. `agent_hints.priority` counts as Dynamo's: higher is more important,
    while the body's own `priority`, as vLLM's, only lowers a request in the queue."""
    given = asked.nvext.agent_hints if asked.nvext is not None else None
    return CacheHints(
        session=_session_of(asked),
        turn_kind=_kind_of(asked),
        priority=bounded_priority(given.priority) if given is not None else 0,
        keep_seconds=asked.cache_ttl_seconds or 0,
        expected_tokens=given.osl if given is not None else 0,
    )


def _session_of(asked: Hinted) -> str:
    """Session of a request; a stored conversation is a session of its own."""
    if asked.session_id:
        return asked.session_id
    if isinstance(asked, ResponsesRequest):
        return asked.conversation_id or ""
    return ""


def _kind_of(asked: Hinted) -> str:
    if isinstance(asked, ChatCompletionRequest) and asked.messages:
        return kind_of_role(asked.messages[-1].role)
    if isinstance(asked, ResponsesRequest):
        is_result = not isinstance(asked.input, str) and any(
            item.type.endswith(OUTPUTS) for item in asked.input[-1:]
        )
        return TOOL if is_result else PERSON
    return ""
