"""A conversation through chat and through Ollama's API: the same prompt ids, and what a scripted
model says to them, whole and in lines."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.processes import THINKER, Gateway
from tests.gateway.scripted_conversation import CITY, IN_CHAT, NOTHING
from tests.gateway.scripted_model import ScriptedModel

ASKED: dict[str, Any] = {
    "model": f"{THINKER}:latest",
    "options": {"num_predict": 400},
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Rain or not.", "parameters": CITY},
        },
        {"type": "function", "function": {"name": "time", "parameters": NOTHING}},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Ulm?"},
        {
            "role": "assistant",
            "content": "I look.",
            "thinking": "A tool knows.",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "Rain."},
        {"role": "user", "content": "And the time?\nIn Ulm."},
    ],
}


def lines_of(gateway: Gateway, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All lines of a stream; the last says that it is done, and no other does."""
    with gateway.client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def test_a_conversation_is_the_same_prompt_and_answer_through_chat_and_ollamas_api(
    scripted: tuple[Gateway, ScriptedModel],
) -> None:
    gateway, model = scripted
    chat = gateway.client.post("/v1/chat/completions", json=IN_CHAT).json()
    whole = gateway.client.post("/api/chat", json=ASKED | {"stream": False})
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    lines = lines_of(gateway, "/api/chat", ASKED)
    assert model.prompt(0) == model.prompt(1) == model.prompt(2)

    output = chat["choices"][0]["message"]
    message = answer["message"]
    assert message["role"] == "assistant"
    assert message["thinking"] == output["reasoning_content"]
    assert message["content"] == output["content"] == "One moment."
    assert [each["function"] for each in message["tool_calls"]] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}},
        {"index": 1, "name": "time", "arguments": {}},
    ]
    assert (answer["model"], answer["done_reason"]) == (ASKED["model"], "stop")
    usage = chat["usage"]
    counts = (answer["prompt_eval_count"], answer["eval_count"])
    assert counts == (usage["prompt_tokens"], usage["completion_tokens"])

    parts = [line["message"] for line in lines]
    for name in ("thinking", "content"):
        assert "".join(part.get(name, "") for part in parts) == message[name]
    calls = [call["function"] for part in parts for call in part.get("tool_calls", [])]
    assert calls == [call["function"] for call in message["tool_calls"]]
    assert lines[-1]["eval_count"] == answer["eval_count"]
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}
