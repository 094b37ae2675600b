"""Tools and thoughts over the whole line: a simulated engine says what a choice of one text makes
it say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time", "description": "The time."}}
USER: Any = [{"role": "user", "content": "What is the weather in Ulm?"}]
SAID = (
    "<think>\nUlm it is.\n</think>\n\nOne moment. "
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def client(thinker: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def answer(gateway: Gateway, **body: Any) -> dict[str, Any]:
    reply = gateway.client.post(
        CHAT, json={"model": MODEL, "messages": USER, "max_tokens": 400, "temperature": 0} | body
    )
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


# Marks are no text to a grammar, so what is to be said is written as a grammar of tokens and text.
def spoken(text: str) -> dict[str, Any]:
    marks = {
        "<think>": "<[8]>",
        "</think>": "<[9]>",
        "<tool_call>": "<[11]>",
        "</tool_call>": "<[12]>",
    }
    pieces = []
    rest = text
    while rest:
        at, mark = min(
            ((rest.find(m) % (len(rest) + 1), m) for m in marks), key=lambda found: found[0]
        )
        pieces += [json.dumps(rest[:at])] if rest[:at] else []
        pieces += [marks[mark]] if at < len(rest) else []
        rest = rest[at + len(mark) :]
    return {"grammar": f"start: {' '.join(pieces)}"}


def test_thoughts_content_and_calls_come_apart_whole_and_streamed(client: openai.OpenAI) -> None:
    # What answers must match begins behind the thoughts, so the thoughts are written by the engine
    # itself.
    asked: Any = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 400,
        "temperature": 0,
        "tools": [WEATHER, TIME],
    }
    sent = {"structured_outputs": spoken(SAID.split("</think>\n\n")[1]), "reasoning_effort": "none"}
    whole = client.chat.completions.create(**asked, extra_body=sent)
    message = whole.choices[0].message
    assert message.content == "One moment."
    calls: Any = message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", '{"city": "Ulm", "days": 3}'),
        ("time", "{}"),
    ]
    assert whole.choices[0].finish_reason == "tool_calls"
    chunks = list(client.chat.completions.create(**asked, extra_body=sent, stream=True))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    streamed: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        if call.id:
            streamed[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
        streamed[call.index]["arguments"] += call.function.arguments or ""
    assert [each["name"] for each in streamed.values()] == ["weather", "time"]
    assert [each["arguments"] for each in streamed.values()] == [
        call.function.arguments for call in calls
    ]
    assert sum(len(delta.tool_calls or []) for delta in deltas) > 6
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_due_is_made_and_keeps_its_schema(thinker: Gateway, choice: Any) -> None:
    whole = answer(thinker, tools=[WEATHER], tool_choice=choice, reasoning_effort="none")[
        "choices"
    ][0]
    [call, *_] = whole["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "weather"
    assert arguments.keys() == {"city", "days"}
    assert isinstance(arguments["days"], int)
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_function_that_is_called_as_a_word_of_tool_choice_is_chosen_by_its_name(
    thinker: Gateway, name: str
) -> None:
    named = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    by_name = {"type": "function", "function": {"name": name}}
    whole = answer(thinker, tools=[WEATHER, named], tool_choice=by_name, reasoning_effort="none")[
        "choices"
    ][0]
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == [name]
    legacy = {
        "functions": [WEATHER["function"], named["function"]],
        "function_call": {"name": name},
    }
    whole = answer(thinker, **legacy, reasoning_effort="none")["choices"][0]
    assert whole["message"]["function_call"]["name"] == name
    flat = [{"type": "function", **each["function"]} for each in (WEATHER, named)]
    asked = {
        "model": MODEL,
        "input": "So?",
        "tools": flat,
        "tool_choice": {"type": "function", "name": name},
    }
    made = thinker.client.post(
        "/v1/responses", json=asked | {"reasoning": {"effort": "none"}}
    ).json()
    assert [item["name"] for item in made["output"]] == [name]


def test_a_name_that_is_a_word_of_tool_choice_is_refused_where_no_function_is_called_so(
    thinker: Gateway,
) -> None:
    asked = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "none"}}
    refused = thinker.client.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    assert (
        refused.json()["error"]["message"] == "tool_choice is 'none'; allowed: one of ['weather']"
    )


def test_only_tools_that_are_allowed_are_called(thinker: Gateway, client: openai.OpenAI) -> None:
    functions = [{"type": "function", "function": {"name": "time"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": functions}}
    asked: Any = {
        "tools": [WEATHER, TIME],
        "reasoning_effort": "none",
        "temperature": 1,
        "seed": 3,
        "n": 3,
    }
    for choice in answer(thinker, tool_choice=allowed, **asked)["choices"]:
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"time"}
    flat: Any = [{"type": "function", **each["function"]} for each in (WEATHER, TIME)]
    choice_of_one: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "time"}],
    }
    made = client.responses.create(
        model=MODEL,
        input="So?",
        tools=flat,
        tool_choice=choice_of_one,
        reasoning={"effort": "none"},
    )
    assert {item.name for item in made.output if item.type == "function_call"} == {"time"}


def test_one_call_is_all_where_calls_are_not_parallel(thinker: Gateway) -> None:
    sent = {"structured_outputs": spoken(SAID.split("One moment. ")[1]), "reasoning_effort": "none"}
    whole = answer(thinker, tools=[WEATHER, TIME], parallel_tool_calls=False, **sent)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_are_shown_unless_none_may_be_called(thinker: Gateway) -> None:
    def num_tokens(**body: Any) -> int:
        return int(answer(thinker, max_tokens=1, **body)["usage"]["prompt_tokens"])

    assert num_tokens(tools=[TIME]) > num_tokens() == num_tokens(tools=[TIME], tool_choice="none")


def test_the_result_of_a_call_goes_back_into_the_conversation(thinker: Gateway) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    asked = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before = answer(thinker, messages=asked, max_tokens=1)["usage"]["prompt_tokens"]
    result = {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "noon"}],
    }
    assert (
        answer(thinker, messages=[*asked, result], max_tokens=1)["usage"]["prompt_tokens"] > before
    )


def test_thoughts_end_at_their_budget_and_are_apart_from_the_answer(thinker: Gateway) -> None:
    asked = {
        "chat_template_kwargs": {"opens_thoughts": True},
        "thinking_token_budget": 20,
        "temperature": 1,
        "seed": 3,
    }
    whole = answer(thinker, **asked, structured_outputs={"choice": ["The end."]})
    message = whole["choices"][0]["message"]
    assert message["content"] == "The end."
    assert message["reasoning_content"]
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 21
    asked |= {"structured_outputs": {"choice": ["The end."]}, "include_reasoning": False}
    hidden = answer(thinker, **asked)
    assert hidden["choices"][0]["message"]["reasoning_content"] is None
    assert hidden["choices"][0]["message"]["content"] == "The end."
    events = thinker.events(
        CHAT,
        {"model": MODEL, "messages": USER, "max_tokens": 400} | asked | {"include_reasoning": True},
    )
    deltas = [event["choices"][0]["delta"] for event in events]
    assert (
        "".join(delta.get("reasoning_content") or "" for delta in deltas)
        == message["reasoning_content"]
    )
    assert "".join(delta.get("content") or "" for delta in deltas) == "The end."


def test_responses_put_thoughts_and_calls_out_as_items(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    asked: Any = {
        "model": MODEL,
        "input": "The weather in Ulm?",
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 0,
    }
    extra = {"chat_template_kwargs": {"opens_thoughts": True}, "thinking_token_budget": 8}
    whole: Any = client.responses.create(**asked, extra_body=extra)
    assert [item.type for item in whole.output][:2] == ["reasoning", "function_call"]
    assert json.loads(whole.output[1].arguments).keys() == {"city", "days"}
    events: Any = list(client.responses.create(**asked, extra_body=extra, stream=True))
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.delta") < kinds.index(
        "response.function_call_arguments.delta"
    )
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    streamed = [
        e.delta
        for e in events
        if e.type == "response.function_call_arguments.delta" and e.item_id == done.item_id
    ]
    assert "".join(streamed) == done.arguments == whole.output[1].arguments


def test_thoughts_are_repeated_as_their_summary_where_one_is_asked_for(
    client: openai.OpenAI,
) -> None:
    """A turn that goes on from it has the same prompt either way."""
    asked: Any = {"model": MODEL, "input": USER, "temperature": 1, "max_output_tokens": 60}
    extra = {
        "chat_template_kwargs": {"opens_thoughts": True},
        "thinking_token_budget": 20,
        "seed": 3,
    }
    extra |= {"structured_outputs": {"choice": ["The end."]}}
    plain: Any = client.responses.create(**asked, extra_body=extra)
    reported: Any = client.responses.create(
        **asked, extra_body=extra, reasoning={"summary": "auto"}
    )
    thoughts = plain.output[0].content[0].text
    assert plain.output[0].summary == []
    assert (
        [part.text for part in reported.output[0].summary]
        == [part.text for part in reported.output[0].content]
        == [thoughts]
    )
    events: Any = list(
        client.responses.create(
            **asked, extra_body=extra, reasoning={"summary": "detailed"}, stream=True
        )
    )
    sent = [event for event in events if event.type.startswith("response.reasoning_summary")]
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in sent]
    assert (kinds[0], *kinds[-2:]) == ("part.added", "text.done", "part.done")
    assert (
        "".join(event.delta for event in sent if event.type.endswith("text.delta"))
        == sent[-2].text
        == thoughts
    )
    assert (
        next(e for e in events if e.type == "response.output_item.done").item.summary[0].text
        == thoughts
    )
    counted = [
        client.responses.create(
            **asked | {"input": "And?"}, previous_response_id=each.id
        ).usage.input_tokens
        for each in (plain, reported)
    ]
    assert counted[0] == counted[1]
    for wrong, param in (
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**asked, extra_body=wrong)
        assert refused.value.param == param


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_grpc_says_by_a_field_that_a_choice_is_a_name(thinker: Gateway, name: str) -> None:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="So?")],
        tools=[common_pb2.Tool(name="time"), common_pb2.Tool(name=name)],
        tool_choice=name,
        tool_choice_is_name=True,
        reasoning_effort="none",
    )
    asked = inference_pb2.ChatRequest(model=MODEL, conversation=conversation)
    with grpc.insecure_channel(thinker.grpc) as channel:
        [choice] = inference_pb2_grpc.InferenceStub(channel).Chat(asked, timeout=60).choices
    assert [call.name for call in choice.message.tool_calls] == [name]


async def test_grpc_has_thoughts_and_calls_apart_too(thinker: Gateway) -> None:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="The weather in Ulm?")],
        tools=[common_pb2.Tool(name="weather", parameters_json=json.dumps(CITY))],
        tool_choice="weather",
        chat_template_kwargs_json='{"opens_thoughts": true}',
    )
    sampling = common_pb2.Sampling(temperature=0, max_tokens=400, thinking_token_budget=8)
    request = inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=sampling)
    async with grpc.aio.insecure_channel(thinker.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        whole = await stub.Chat(request)
        [call] = whole.choices[0].message.tool_calls
        assert json.loads(call.arguments).keys() == {"city", "days"}
        assert whole.choices[0].message.reasoning_content
        assert 0 < whole.usage.reasoning_tokens <= 9
        chunks = [chunk async for chunk in stub.ChatStream(request)]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert (
        "".join(chunk.reasoning_content for chunk in chunks)
        == whole.choices[0].message.reasoning_content
    )


def test_the_text_of_a_response_keeps_its_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "trip", "schema": CITY, "strict": True}
    asked: Any = {
        "model": MODEL,
        "input": "A trip.",
        "text": {"format": form},
        "reasoning": {"effort": "none"},
    }
    made = client.responses.create(**asked, temperature=0)
    assert json.loads(made.output_text).keys() == {"city", "days"}
    assert made.text.model_dump(exclude_none=True, by_alias=True)["format"]["name"] == "trip"
