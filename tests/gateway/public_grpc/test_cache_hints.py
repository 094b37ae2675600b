"""Hints on cached blocks in calls of the public gRPC surface."""

from __future__ import annotations

import pytest

from headwater.gateway.cache_hints import NO_HINTS, CacheHints
from headwater.gateway.public_grpc.cache_hints import hints_of
from headwater.proto.common_pb2 import ChatMessage
from headwater.proto.inference_pb2 import ChatRequest, CompleteRequest, PromptHints
from headwater.proto.processor_pb2 import Conversation
from headwater.services.runtime.errors import BadRequest


def chat(role: str, hints: PromptHints | None = None) -> CacheHints:
    messages = [ChatMessage(role=role, content="Hello.")]
    return hints_of(ChatRequest(conversation=Conversation(messages=messages), hints=hints))


@pytest.mark.parametrize(("role", "kind"), [("user", "person"), ("tool", "tool")])
def test_the_last_message_tells_a_tools_turn_from_a_persons(role: str, kind: str) -> None:
    assert chat(role) == CacheHints(turn_kind=kind)


def test_hints_of_a_call_are_taken_over() -> None:
    given = PromptHints(session_id="s", cache_ttl_seconds=60, priority=-3, expected_tokens=300)
    taken = CacheHints(session="s", keep_seconds=60, priority=-3, expected_tokens=300)
    assert hints_of(CompleteRequest(text="a", hints=given)) == taken
    assert hints_of(CompleteRequest(text="a")) == NO_HINTS


@pytest.mark.parametrize("given", [-8, 8])
def test_a_higher_priority_keeps_blocks_longer(given: int) -> None:
    assert chat("user", PromptHints(priority=given)).priority == given


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        (PromptHints(session_id="s" * 257), "hints.session_id has 257 characters"),
        (PromptHints(cache_ttl_seconds=86_401), "hints.cache_ttl_seconds is 86401"),
        (PromptHints(priority=9), "hints.priority is 9"),
        (PromptHints(priority=-9), "hints.priority is -9"),
        (PromptHints(expected_tokens=1 << 25), "hints.expected_tokens is"),
    ],
)
def test_a_hint_out_of_range_is_refused_by_name(hints: PromptHints, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chat("user", hints)
