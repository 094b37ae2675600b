"""Kinds of turns in bodies of Ollama's API."""

from __future__ import annotations

import pytest

from headwater.gateway.cache_hints import NO_HINTS, CacheHints
from headwater.gateway.ollama.cache_hints import hints_of
from headwater.gateway.ollama.schema import ChatRequest, GenerateRequest, Message


@pytest.mark.parametrize(("role", "kind"), [("user", "person"), ("tool", "tool")])
def test_the_last_message_tells_a_tools_turn_from_a_persons(role: str, kind: str) -> None:
    messages = [Message(role="user", content="Hello."), Message(role=role, content="A river.")]
    assert hints_of(ChatRequest(model="m", messages=messages)) == CacheHints(turn_kind=kind)


def test_a_prompt_without_messages_has_no_hints() -> None:
    assert hints_of(GenerateRequest(model="m", prompt="Hello.")) == NO_HINTS
    assert hints_of(ChatRequest(model="m")) == NO_HINTS
