"""Bodies that client libraries send, word for word. Beside each stands the library that sent it,
with its release."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.openai.test_tools import spoken
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
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
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": CITY,
    "strict": True,
}
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
    "tools": [
        {
            "type": "function",
            "name": "Trip",
            "parameters": TRIP,
            "description": "Correctly extracted `Trip`",
        }
    ],
}
# openai-agents 0.24.0, an agent with a tool, an output type and tool_choice="required".
AGENT_RESPONSE: Any = {
    "include": [],
    "input": USER,
    "instructions": "Plan.",
    "max_output_tokens": 300,
    "model": MODEL,
    "temperature": 0.0,
    "text": {
        "format": {"type": "json_schema", "name": "final_output", "schema": TRIP, "strict": True}
    },
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


@pytest.mark.parametrize(
    ("body", "name"), [(INSTRUCTOR, "Trip"), (AGENT_RESPONSE, "weather")], ids=["named", "any"]
)
def test_an_enforced_call_wins_over_the_format_of_a_response(
    thinker: Gateway, body: Any, name: str
) -> None:
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


# guidance 0.3.1, models.experimental.VLLMModel, `select(["yes", "no"])`: for servers before vLLM
# 0.12 and since.
YES_OR_NO = '%llguidance {}\n\nstart: a\na[capture]: A\n\nA: "yes"\n     | "no"\n\n'
GUIDANCE: Any = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Is water wet?"}]}],
    "model": MODEL,
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": None,
    "top_logprobs": 5,
    "top_p": None,
    "guided_decoding_backend": "guidance",
    "guided_grammar": YES_OR_NO,
    "structured_outputs": {"grammar": YES_OR_NO},
}
ONE: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}},
    "required": ["a"],
}
SAME: list[dict[str, Any]] = [
    {"guided_json": ONE, "structured_outputs": {"json": json.dumps(ONE, indent=2, sort_keys=True)}},
    {
        "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}},
        "guided_json": ONE,
    },
    {"guided_choice": ["yes", "no"], "structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_regex": "yes|no", "structured_outputs": {"regex": "yes|no"}, "regex": "yes|no"},
]
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    (GUIDANCE | {"guided_grammar": 'start: "maybe"'}, "guided_grammar"),
    ({"guided_json": ONE, "structured_outputs": {"json": ONE | {"required": []}}}, "guided_json"),
    (
        {"guided_choice": ["yes", "no"], "structured_outputs": {"choice": ["no", "yes", "so"]}},
        "guided_choice",
    ),
    ({"guided_regex": "yes", "structured_outputs": {"choice": ["yes"]}}, "guided_regex"),
]


def test_one_constraint_in_two_spellings_is_one(thinker: Gateway) -> None:
    events = thinker.events(CHAT, GUIDANCE | {"reasoning_effort": "none"})
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    assert text in ("yes", "no")
    for choice in (choice for event in events for choice in event["choices"] if choice["logprobs"]):
        # guidance takes the tokens of an event for its text, where there are several.
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        assert choice["delta"].get("content", "") in ("".join(tokens), "")
    asked = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 200,
        "temperature": 0,
        "reasoning_effort": "none",
    }
    for body in SAME:
        content = posted(thinker, CHAT, asked | body)["choices"][0]["message"]["content"]
        assert content in ("yes", "no") or json.loads(content).keys() == {"a"}, body


@pytest.mark.parametrize(("body", "param"), DIFFERENT, ids=["grammar", "schema", "choice", "kind"])
def test_two_constraints_that_differ_are_refused(
    thinker: Gateway, body: dict[str, Any], param: str
) -> None:
    asked = {"model": MODEL, "messages": USER} | body | {"stream": False, "stream_options": None}
    error = posted(thinker, CHAT, asked, 400)["error"]
    assert error["param"] == param
    assert "one kind of structured output" in error["message"]


def test_a_response_takes_one_constraint_in_two_spellings_too(thinker: Gateway) -> None:
    text = {"format": {"type": "json_schema", "name": "one", "schema": ONE}}
    asked = {
        "model": MODEL,
        "input": "One.",
        "reasoning": {"effort": "none"},
        "temperature": 0,
        "text": text,
    }
    made = posted(thinker, RESPONSES, asked | {"structured_outputs": {"json": ONE}})
    assert json.loads(made["output"][0]["content"][0]["text"]).keys() == {"a"}
    refused = posted(thinker, RESPONSES, asked | {"structured_outputs": {"regex": "1"}}, 400)[
        "error"
    ]
    assert refused["param"] == "structured_outputs.regex"


# pydantic's schemas, as instructor 1.17.0 (JSON_SCHEMA), LangChain and others send them without
# `strict`.
NESTED: Any = {
    "$defs": {
        "Stop": {
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "type": "object",
        },
    },
    "properties": {
        "first": {"$ref": "#/$defs/Stop"},
        "last": {"anyOf": [{"$ref": "#/$defs/Stop"}, {"type": "null"}]},
    },
    "required": ["first", "last"],
    "title": "Trip",
    "type": "object",
}
FORM: Any = {"name": "Trip", "schema": NESTED}
SPELLED: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": FORM}},
    "strict": {"response_format": {"type": "json_schema", "json_schema": FORM | {"strict": True}}},
    "guided_json": {"guided_json": NESTED},
    "disable_additional_properties": {
        "structured_outputs": {"json": NESTED, "disable_additional_properties": True}
    },
}


def check_named(text: str) -> None:
    """No object has a key that the schema does not name."""
    trip = json.loads(text)
    assert trip.keys() == {"first", "last"}
    assert all(stop is None or stop.keys() == {"city"} for stop in trip.values())


@pytest.mark.parametrize("body", SPELLED.values(), ids=SPELLED)
def test_keys_that_a_schema_does_not_name_are_not_invented(
    thinker: Gateway, body: dict[str, Any]
) -> None:
    asked = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 400,
        "temperature": 1,
        "seed": 5,
        "n": 4,
    }
    for choice in posted(thinker, CHAT, asked | body | {"reasoning_effort": "none"})["choices"]:
        check_named(choice["message"]["content"])


def test_keys_are_invented_where_a_schema_opens_its_objects(thinker: Gateway) -> None:
    free = ONE | {"additionalProperties": True}
    asked = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 400,
        "temperature": 1,
        "seed": 5,
        "n": 4,
    }
    made = posted(thinker, CHAT, asked | {"guided_json": free, "reasoning_effort": "none"})
    keys = {key for choice in made["choices"] for key in json.loads(choice["message"]["content"])}
    assert len(keys) > 1


async def test_keys_are_not_invented_in_responses_or_on_grpc_either(thinker: Gateway) -> None:
    text = {"format": {"type": "json_schema", "name": "Trip", "schema": NESTED}}
    asked = {
        "model": MODEL,
        "input": "A trip.",
        "reasoning": {"effort": "none"},
        "temperature": 1,
        "seed": 5,
    }
    made = posted(thinker, RESPONSES, asked | {"text": text})
    check_named(made["output"][0]["content"][0]["text"])
    user = common_pb2.ChatMessage(role="user", content="A trip.")
    conversation = processor_pb2.Conversation(messages=[user], reasoning_effort="none")
    output = common_pb2.StructuredOutput(json_schema=json.dumps(NESTED))
    sampling = common_pb2.Sampling(
        temperature=1, seed=5, n=4, max_tokens=400, structured_output=output
    )
    request = inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=sampling)
    async with grpc.aio.insecure_channel(thinker.grpc) as channel:
        reply = await inference_pb2_grpc.InferenceStub(channel).Chat(request)
    for choice in reply.choices:
        check_named(choice.message.content)


# OpenAI's older guides, and clients that were written by them (LangChain's
# convert_to_openai_function, LiteLLM).
LEGACY: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Ulm?"}],
    "functions": [{"name": "weather", "description": "The weather in a city.", "parameters": CITY}],
    "temperature": 0,
    "max_tokens": 300,
    "reasoning_effort": "none",
}
FORCED: Any = LEGACY | {"function_call": {"name": "weather"}}
TWO_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


def test_functions_of_old_are_called_and_answered_as_they_were(thinker: Gateway) -> None:
    [choice] = posted(thinker, CHAT, FORCED)["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "stop")
    assert "tool_calls" not in message
    assert message["function_call"]["name"] == "weather"
    assert json.loads(message["function_call"]["arguments"]).keys() == {"city"}
    deltas = [event["choices"][0]["delta"] for event in thinker.events(CHAT, FORCED)]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == message["function_call"]["arguments"]
    assert not [delta for delta in deltas if "tool_calls" in delta]


def test_a_function_that_the_model_chose_ends_the_answer_with_that_reason(thinker: Gateway) -> None:
    # Two calls are written, of which the old words can tell one.
    printed = {"structured_outputs": spoken(TWO_CALLS)}
    [choice] = posted(thinker, CHAT, LEGACY | printed)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    ends = [
        event["choices"][0]["finish_reason"] for event in thinker.events(CHAT, LEGACY | printed)
    ]
    assert ends[-1] == "function_call"
    [choice] = posted(thinker, CHAT, LEGACY | {"function_call": "none", "max_tokens": 4})["choices"]
    assert (choice["message"].get("function_call"), choice["finish_reason"]) == (None, "length")


def test_a_conversation_in_old_words_is_the_prompt_of_one_in_new_ones(thinker: Gateway) -> None:
    old = [
        *LEGACY["messages"],
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'},
        },
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "user", "content": "And in Bonn?", "function_call": None},
    ]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    new = [
        old[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain"},
        old[3],
    ]
    tools = [{"type": "function", "function": LEGACY["functions"][0]}]
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    reported = posted(thinker, CHAT, asked | {"messages": old, "functions": LEGACY["functions"]})
    same = posted(thinker, CHAT, asked | {"messages": new, "tools": tools})
    assert reported["prompt_token_ids"] == same["prompt_token_ids"]
    counts = [
        posted(thinker, "/tokenize", {"model": MODEL, "messages": each, "tools": tools})
        for each in (old, new)
    ]
    assert counts[0]["tokens"] == counts[1]["tokens"] == same["prompt_token_ids"]


# @ai-sdk/openai 3.0.141, `openai.chat` with toolChoice "required", and by name; it shows a text
# part for each content.
def test_the_first_delta_of_an_enforced_call_has_no_content(thinker: Gateway) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    asked = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 300,
        "reasoning_effort": "none",
        "tools": tools,
    }
    named = [{"type": "function", "function": {"name": "weather"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    for choice in ("required", named[0], allowed):
        deltas = [
            event["choices"][0]["delta"]
            for event in thinker.events(CHAT, asked | {"tool_choice": choice})
        ]
        assert deltas[0] == {"role": "assistant", "content": None}
        assert not [delta for delta in deltas[1:] if "content" in delta], choice
    may = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    for choice in ("auto", may):
        events = thinker.events(CHAT, asked | {"tool_choice": choice, "max_tokens": 4})
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
