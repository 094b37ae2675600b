"""Bodies that client libraries send, word for word. Beside each stands the library that sent it, with its release."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TRIP: Any = {
    "properties": {
        "city": {"maxLength": 8, "title": "City", "type": "string"},
        "days": {"maximum": 9, "minimum": 1, "title": "Days", "type": "integer"},
    },
    "required": ["city", "days"],
    "title": "Trip",
    "type": "object",
    "additionalProperties": False,
}
CITY: Any = {
    "properties": {"city": {"title": "City", "type": "string", "maxLength": 8}},
    "required": ["city"],
    "title": "weather_args",
    "type": "object",
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "The weather in a city.", "parameters": CITY, "strict": True}
USER: Any = [{"role": "user", "content": "A trip to Ulm."}]


def posted(gateway: Gateway, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    reply = gateway.client.post(path, json=body)
    assert reply.status_code == status, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


# instructor 1.17.0, Mode.RESPONSES_TOOLS.
INSTRUCTOR: Any = {
    "input": USER,
    "model": MODEL,
    "reasoning": {"effort": "none"},
    "temperature": 0,
    "text": {"format": {"type": "json_schema", "name": "Trip", "strict": True, "schema": TRIP}},
    "tool_choice": {"type": "function", "name": "Trip"},
    "tools": [{"type": "function", "name": "Trip", "parameters": TRIP, "description": "Correctly extracted `Trip`"}],
}
# openai-agents 0.24.0, an agent with a tool, an output type and tool_choice="required".
AGENT_RESPONSE: Any = {
    "include": [],
    "input": USER,
    "instructions": "Plan.",
    "max_output_tokens": 300,
    "model": MODEL,
    "temperature": 0.0,
    "text": {"format": {"type": "json_schema", "name": "final_output", "schema": TRIP, "strict": True}},
    "tool_choice": "required",
    "tools": [{"type": "function", **WEATHER}],
    "reasoning": {"effort": "none"},
}
AGENT_CHAT: Any = {
    "messages": [{"content": "Plan.", "role": "system"}, *USER],
    "model": MODEL,
    "max_tokens": 300,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "final_output", "strict": True, "schema": TRIP},
    },
    "temperature": 0.0,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": WEATHER}],
    "reasoning_effort": "none",
}


@pytest.mark.parametrize(("body", "name"), [(INSTRUCTOR, "Trip"), (AGENT_RESPONSE, "weather")], ids=["named", "any"])
def test_an_enforced_call_wins_over_the_format_of_a_response(thinker: Gateway, body: Any, name: str) -> None:
    output = posted(thinker, RESPONSES, body)["output"]
    assert {item["type"] for item in output} == {"function_call"}
    assert {item["name"] for item in output} == {name}
    schema = TRIP if name == "Trip" else CITY
    assert all(json.loads(item["arguments"]).keys() == set(schema["required"]) for item in output)


def test_an_enforced_call_wins_over_the_format_of_a_chat(thinker: Gateway) -> None:
    [choice] = posted(thinker, CHAT, AGENT_CHAT)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"weather"}
    [choice] = posted(thinker, CHAT, AGENT_CHAT | {"tool_choice": "none"})["choices"]
    assert json.loads(choice["message"]["content"]).keys() == {"city", "days"}


async def test_an_enforced_call_wins_over_structured_output_on_grpc(thinker: Gateway) -> None:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="A trip to Ulm.")],
        tools=[common_pb2.Tool(name="weather", parameters_json=json.dumps(CITY))],
        tool_choice="required",
        reasoning_effort="none",
    )
    output = common_pb2.StructuredOutput(json_schema=json.dumps(TRIP))
    sampling = common_pb2.Sampling(temperature=0, max_tokens=300, structured_output=output)
    request = inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=sampling)
    async with grpc.aio.insecure_channel(thinker.grpc) as channel:
        message = (await inference_pb2_grpc.InferenceStub(channel).Chat(request)).choices[0].message
    assert {call.name for call in message.tool_calls} == {"weather"}
    assert not message.content
