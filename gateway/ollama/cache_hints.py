"""Kind of turn of Ollama's chats, as a hint on their cached blocks."""

from __future__ import annotations

from ..cache_hints import NO_HINTS, CacheHints, kind_of_role
from .schema import ChatRequest, GenerateRequest


def hints_of(asked: ChatRequest | GenerateRequest) -> CacheHints:
    """The hints of a body: who wrote its last message."""
    if not isinstance(asked, ChatRequest) or not asked.messages:
        return NO_HINTS
    return CacheHints(turn_kind=kind_of_role(asked.messages[-1].role))
