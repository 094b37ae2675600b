"""One conversation through every API: the same prompt ids, and so the same answer. The simulated
engine's tokens depend on every token of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import THINKER, Gateway

NUM_TOKENS = 12
SYSTEM = "Be brief."
QUESTION = "How is the weather in Ulm?"
TOWN = {"town": "Ulm"}
RESULT = "Rain."
NEXT = "And tomorrow?"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Tells the weather."}
FUNCTION = {"type": "function", "function": WEATHER | {"parameters": SCHEMA}}


@dataclass(frozen=True, slots=True)
class Said:
    """What an API says of an answer."""

    text: str
    """Content and thoughts."""
    prompt_tokens: int
    output_tokens: int


def post(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = gateway.client.post(path, json={"model": THINKER} | body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def chat(gateway: Gateway) -> Said:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [calling(json.dumps(TOWN))]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        {"role": "user", "content": NEXT},
    ]
    body = {"messages": messages, "tools": [FUNCTION], "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = post(gateway, "/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    usage = answer["usage"]
    text = (message["reasoning_content"] or "") + (message["content"] or "")
    return Said(text, usage["prompt_tokens"], usage["completion_tokens"])


def responses(gateway: Gateway) -> Said:
    items = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": json.dumps(TOWN),
        },
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        {"role": "user", "content": NEXT},
    ]
    tool = {"type": "function", "parameters": SCHEMA} | WEATHER
    body = {"input": items, "tools": [tool], "max_output_tokens": NUM_TOKENS, "temperature": 0}
    answer = post(gateway, "/v1/responses", body | {"store": False})
    texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
    usage = answer["usage"]
    return Said("".join(texts), usage["input_tokens"], usage["output_tokens"])


def messages(gateway: Gateway) -> Said:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": TOWN}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}
    body = {
        "system": SYSTEM,
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": NEXT}]},
        ],
        "tools": [WEATHER | {"input_schema": SCHEMA}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    answer = post(gateway, "/v1/messages", body)
    texts = [block.get("thinking") or block.get("text", "") for block in answer["content"]]
    usage = answer["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Said("".join(texts), num_prompt, usage["output_tokens"])


def ollama(gateway: Gateway) -> Said:
    printed = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [calling(TOWN)]},
        {"role": "tool", "tool_name": "weather", "content": RESULT},
        {"role": "user", "content": NEXT},
    ]
    options = {"num_predict": NUM_TOKENS, "temperature": 0}
    body = {"messages": printed, "tools": [FUNCTION], "options": options, "stream": False}
    answer = post(gateway, "/api/chat", body)
    message = answer["message"]
    text = message.get("thinking", "") + message["content"]
    return Said(text, answer["prompt_eval_count"], answer["eval_count"])


def over_grpc(gateway: Gateway) -> Said:
    call = common_pb2.ToolCall(id="call_1", name="weather", arguments=json.dumps(TOWN))
    printed = [
        common_pb2.ChatMessage(role="system", content=SYSTEM),
        common_pb2.ChatMessage(role="user", content=QUESTION),
        common_pb2.ChatMessage(role="assistant", content="", tool_calls=[call]),
        common_pb2.ChatMessage(role="tool", tool_call_id="call_1", content=RESULT),
        common_pb2.ChatMessage(role="user", content=NEXT),
    ]
    tool = common_pb2.Tool(parameters_json=json.dumps(SCHEMA), **WEATHER)
    request = inference_pb2.ChatRequest(
        model=THINKER,
        conversation=processor_pb2.Conversation(messages=printed, tools=[tool]),
        sampling=common_pb2.Sampling(max_tokens=NUM_TOKENS, temperature=0),
    )
    with grpc.insecure_channel(gateway.stage.addresses["grpc"]) as channel:
        reply = inference_pb2_grpc.InferenceStub(channel).Chat(request, timeout=60)
    message = reply.choices[0].message
    text = message.reasoning_content + message.content
    return Said(text, reply.usage.prompt_tokens, reply.usage.completion_tokens)


@pytest.mark.parametrize("api", [responses, messages, ollama, over_grpc])
def test_a_conversation_has_one_prompt_and_one_answer_in_every_api(
    thinker: Gateway, api: Callable[[Gateway], Said]
) -> None:
    expected = chat(thinker)
    assert expected.output_tokens == NUM_TOKENS
    assert len(expected.text) > 1
    assert api(thinker) == expected
