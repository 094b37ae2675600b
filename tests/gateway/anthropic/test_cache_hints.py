"""`cache_control` of Anthropic's bodies as hints on cached blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.anthropic.cache_hints import hints_of
from headwater.gateway.anthropic.decode import decode
from headwater.gateway.anthropic.schema import MessagesRequest
from headwater.gateway.cache_hints import CacheHints

RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "A river."}


def hints(content: Any = "Hello.", **fields: Any) -> CacheHints:
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": "m", "max_tokens": 8, "messages": messages, **fields}).encode()
    return hints_of(decode(body, MessagesRequest))


def text(control: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "A river.", "cache_control": control}]


@pytest.mark.parametrize(
    ("control", "seconds"),
    [
        ({"type": "ephemeral"}, 300),
        ({"type": "ephemeral", "ttl": "5m"}, 300),
        ({"type": "ephemeral", "ttl": "1h"}, 3600),
        ({"type": "ephemeral", "ttl": "1w"}, 0),
        ({"type": "ephemeral", "ttl": ["1h"]}, 0),
        ("ephemeral", 0),
        (None, 0),
    ],
)
def test_cache_control_keeps_blocks_for_its_time(control: Any, seconds: int) -> None:
    assert hints(system=text(control)).keep_seconds == seconds
    assert hints(text(control)).keep_seconds == seconds
    assert hints(cache_control=control).keep_seconds == seconds
    tool = {"name": "look", "input_schema": {"type": "object"}, "cache_control": control}
    assert hints(tools=[tool]).keep_seconds == seconds


def test_the_longest_time_of_a_body_counts() -> None:
    long = {"type": "ephemeral", "ttl": "1h"}
    assert hints(text({"type": "ephemeral"}), system=text(long)).keep_seconds == 3600


def test_a_result_of_a_tool_tells_a_tools_turn_from_a_persons() -> None:
    assert hints([RESULT]).turn_kind == "tool"
    assert hints().turn_kind == "person"
