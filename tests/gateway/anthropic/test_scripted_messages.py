"""A conversation through chat and through the Messages API: the same prompt ids, and what a
scripted model says to them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.processes import THINKER, Gateway
from tests.gateway.scripted_conversation import CITY, IN_CHAT, NOTHING
from tests.gateway.scripted_model import ScriptedModel

ASKED: dict[str, Any] = {
    "model": THINKER,
    "max_tokens": 400,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "weather", "description": "Rain or not.", "input_schema": CITY},
        {"name": "time", "input_schema": NOTHING},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "messages": [
        {"role": "user", "content": "What is the weather in Ulm?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A tool knows.", "signature": "any"},
                {"type": "redacted_thinking", "data": "sealed"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "Rain."}],
                },
                {"type": "text", "text": "And the time?"},
                {"type": "text", "text": "In Ulm."},
            ],
        },
    ],
}


def test_a_conversation_is_the_same_prompt_and_answer_through_chat_and_messages(
    scripted: tuple[Gateway, ScriptedModel],
) -> None:
    gateway, model = scripted
    chat = gateway.client.post("/v1/chat/completions", json=IN_CHAT).json()
    whole = gateway.client.post("/v1/messages", json=ASKED)
    assert whole.status_code == 200, whole.text
    message = whole.json()
    count = gateway.client.post("/v1/messages/count_tokens", json=without_length(ASKED)).json()
    events = streamed(gateway, ASKED)
    assert model.prompt(0) == model.prompt(1) == model.prompt(2)
    assert count == {"input_tokens": len(model.prompt(0))}

    output = chat["choices"][0]["message"]
    thinking, text, *calls = message["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] == output["reasoning_content"]
    assert thinking["signature"]
    assert (
        text
        == {"type": "text", "text": output["content"]}
        == {"type": "text", "text": "One moment."}
    )
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in output["tool_calls"]
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert without_ids(joined(events)) == without_ids(message)


def test_events_come_in_their_order(scripted: tuple[Gateway, ScriptedModel]) -> None:
    events = streamed(scripted[0], ASKED)
    kinds = [each["type"] for each in events]
    blocks = [kind for kind in kinds if kind != "content_block_delta"]
    assert blocks == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    for index in range(4):
        own = [each for each in events if each.get("index") == index]
        assert own[0]["type"] == "content_block_start"
        assert own[-1]["type"] == "content_block_stop"
    deltas = [each["delta"]["type"] for each in events if each["type"] == "content_block_delta"]
    once = [kind for i, kind in enumerate(deltas) if deltas[:i][-1:] != [kind]]
    assert once == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert start["usage"]["input_tokens"] > 0


def without_length(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


def streamed(gateway: Gateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, each of which has its type as its name too."""
    with gateway.client.stream("POST", "/v1/messages", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line for line in reply.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {each['type']}" for each in events]
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events."""
    message: dict[str, Any] = events[0]["message"]
    blocks: list[dict[str, Any]] = message["content"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"] | {"parts": []})
            case "content_block_delta":
                [name] = event["delta"].keys() - {"type"}
                if name == "signature":
                    blocks[event["index"]]["signature"] = event["delta"][name]
                else:
                    blocks[event["index"]]["parts"].append(event["delta"][name])
            case "content_block_stop":
                block = blocks[event["index"]]
                text = "".join(block.pop("parts"))
                kind = block["type"]
                if kind == "tool_use":
                    block["input"] = json.loads(text or "{}")
                else:
                    block[kind] = text
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    usage = message["usage"] | {"cache_read_input_tokens": 0, "input_tokens": 0}
    return message | {"id": "", "content": content, "usage": usage}
