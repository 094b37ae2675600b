"""Hints of calls on their prompts' cached blocks."""

from __future__ import annotations

from headwater.proto import inference_pb2
from headwater.services.runtime.errors import BadRequest

from ..cache_hints import (
    MAX_CACHE_PRIORITY,
    MAX_KEEP_SECONDS,
    MAX_SESSION_LEN,
    CacheHints,
    kind_of_role,
)
from ..tenancy.caller import MAX_EXPECTED_TOKENS
from .messages import Asked


def hints_of(request: Asked) -> CacheHints:
    """The hints of a request. Raises `BadRequest`."""
    given = request.hints
    if len(given.session_id) > MAX_SESSION_LEN:
        raise BadRequest(
            "hints.session_id",
            f"hints.session_id has {len(given.session_id)} characters; allowed: at most "
            f"{MAX_SESSION_LEN}",
        )
    if abs(given.priority) > MAX_CACHE_PRIORITY:
        raise BadRequest.of(
            "hints.priority",
            given.priority,
            f"a whole number, -{MAX_CACHE_PRIORITY}…{MAX_CACHE_PRIORITY}",
        )
    if given.cache_ttl_seconds > MAX_KEEP_SECONDS:
        raise BadRequest.of(
            "hints.cache_ttl_seconds",
            given.cache_ttl_seconds,
            f"a whole number, 0…{MAX_KEEP_SECONDS}",
        )
    if given.expected_tokens > MAX_EXPECTED_TOKENS:
        raise BadRequest.of(
            "hints.expected_tokens",
            given.expected_tokens,
            f"a whole number, 0…{MAX_EXPECTED_TOKENS}",
        )
    return CacheHints(
        session=given.session_id,
        turn_kind=_kind_of(request),
        priority=given.priority,
        keep_seconds=given.cache_ttl_seconds,
        expected_tokens=given.expected_tokens,
    )


def _kind_of(request: Asked) -> str:
    if not isinstance(request, inference_pb2.ChatRequest) or not request.conversation.messages:
        return ""
    return kind_of_role(request.conversation.messages[-1].role)
