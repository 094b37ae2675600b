"""Stop strings and calls that are cut: the whole answer and the stream say the same, over chat,
responses and gRPC."""

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

SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"const": "abcSTOPd"}},
    "required": ["a"],
    "additionalProperties": False,
}
USER = "Which rivers are there?"
CUT = '{"a":"abc'
WHOLE = '{"a":"abcSTOPd"}'
MARKS = ["<tool_call>", "name", "\n", "}}"]
CASES = [
    pytest.param(["STOP"], "required", CUT, "stop", id="an enforced call is cut"),
    pytest.param(["STOP"], "note", CUT, "stop", id="a named call is cut"),
    pytest.param(MARKS, "required", WHOLE, "tool_calls", id="marks cut no enforced call"),
    pytest.param(MARKS, "note", WHOLE, "stop", id="marks cut no named call"),
]


def without_space(arguments: str) -> str:
    """Arguments without the white space that their grammar allows between names and values."""
    return "".join(arguments.split())


@pytest.fixture(scope="module")
def client(thinker: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


@pytest.mark.parametrize(("stop", "choice", "arguments", "reason"), CASES)
def test_a_chat_says_that_a_stop_string_cut_a_call(
    client: openai.OpenAI, stop: list[str], choice: str, arguments: str, reason: str
) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": USER}],
        "tools": [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}],
        "tool_choice": choice
        if choice == "required"
        else {"type": "function", "function": {"name": choice}},
        "parallel_tool_calls": False,
        "stop": stop,
        "temperature": 0,
        "reasoning_effort": "none",
    }
    whole: Any = client.chat.completions.create(**asked).choices[0]
    [call] = whole.message.tool_calls
    assert (without_space(call.function.arguments), whole.finish_reason) == (arguments, reason)
    assert whole.message.content is None
    chunks: Any = [
        chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (reason, whole.stop_reason)
    assert whole.stop_reason == ("STOP" if arguments == CUT else None)


@pytest.mark.parametrize(("stop", "choice", "arguments", "reason"), CASES)
def test_a_response_says_that_a_stop_string_cut_a_call(
    client: openai.OpenAI, stop: list[str], choice: str, arguments: str, reason: str
) -> None:
    asked: Any = {
        "model": MODEL,
        "input": USER,
        "tools": [{"type": "function", "name": "note", "parameters": SCHEMA}],
        "tool_choice": choice if choice == "required" else {"type": "function", "name": choice},
        "parallel_tool_calls": False,
        "temperature": 0,
        "reasoning": {"effort": "none"},
        "extra_body": {"stop": stop},
    }
    status = "incomplete" if arguments == CUT else "completed"
    whole: Any = client.responses.create(**asked)
    [call] = whole.output
    assert (without_space(call.arguments), call.status) == (arguments, status)
    events: Any = list(client.responses.create(**asked, stream=True))
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == call.arguments
    [streamed] = events[-1].response.output
    assert (streamed.arguments, streamed.status) == (call.arguments, status)
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == [
        status
    ]


@pytest.mark.parametrize(("stop", "choice", "arguments", "reason"), CASES)
def test_grpc_says_that_a_stop_string_cut_a_call(
    thinker: Gateway, stop: list[str], choice: str, arguments: str, reason: str
) -> None:
    request = inference_pb2.ChatRequest(
        model=MODEL,
        conversation=processor_pb2.Conversation(
            messages=[common_pb2.ChatMessage(role="user", content=USER)],
            tools=[common_pb2.Tool(name="note", parameters_json=json.dumps(SCHEMA))],
            tool_choice=choice,
            parallel_tool_calls=False,
            reasoning_effort="none",
        ),
        sampling=common_pb2.Sampling(temperature=0, max_tokens=100, stop=stop),
    )
    expected = {
        "stop": common_pb2.FINISH_REASON_STOP,
        "tool_calls": common_pb2.FINISH_REASON_TOOL_CALLS,
    }[reason]
    with grpc.insecure_channel(thinker.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        [whole] = stub.Chat(request, timeout=60).choices
        chunks = list(stub.ChatStream(request, timeout=60))
    [call] = whole.message.tool_calls
    assert (without_space(call.arguments), whole.finish_reason) == (arguments, expected)
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [expected]


def test_a_stop_string_that_only_thoughts_contain_ends_nothing(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": USER}],
        "max_tokens": 40,
        "temperature": 0,
    }
    more = {
        "chat_template_kwargs": {"opens_thoughts": True},
        "thinking_token_budget": 6,
        "structured_outputs": {"choice": ["Now think again."]},
    }
    free: Any = client.chat.completions.create(**asked, extra_body=more).choices[0]
    thoughts = free.message.reasoning
    content = free.message.content
    for stop, reported in (([thoughts, "</think>"], content), (["hink"], content.split("hink")[0])):
        whole: Any = client.chat.completions.create(**asked, stop=stop, extra_body=more).choices[0]
        chunks: Any = list(
            client.chat.completions.create(**asked, stop=stop, stream=True, extra_body=more)
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert (whole.message.content, whole.message.reasoning) == (reported, thoughts)
        assert "".join(delta.content or "" for delta in deltas) == reported
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == thoughts
        assert (whole.finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")
