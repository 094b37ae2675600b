"""Bodies that are refused and whose sender hopes that refusing them costs much: time of the event
loop, or memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.schema import ChatCompletionRequest
from headwater.proto import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    processor_pb2,
    processor_pb2_grpc,
)
from headwater.services.runtime.errors import BadRequest
from tests.gateway.processes import MODEL, Gateway, chat_body, processor_stage, started

CHAT = "/v1/chat/completions"
BEGIN = b'{"model":"m","messages":[{"role":"user","content":"x"}],'
MIB = 1 << 20
# What a body of 4 MB becomes when all of it is parsed takes 20 times that.
COSTLY: dict[str, tuple[bytes, str | None]] = {
    "90k lone surrogates": (
        BEGIN + b'"metadata":{%s}}' % b",".join(b'"\\ud800%d":1' % i for i in range(90_000)),
        None,
    ),
    "four megabytes of lists": (b'{"model":5,"metadata":[%s1]}' % (b"[]," * 1_300_000), None),
    "a fault before 80,000 lists": (
        b'{"model":5,"metadata":[%s1]}' % (b"[]," * 80_000),
        "model",
    ),
    "a long name with a thousand children": (
        BEGIN + b'"metadata":{"%s":[%s"\\ud800"]}}' % (b"a" * 50_000, b"1," * 2000),
        f"metadata.{'a' * 80}[2000]",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_the_first_fault_of_a_body_ends_its_reading(name: str) -> None:
    body, param = COSTLY[name]
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest) as raised:
            decode(body, ChatCompletionRequest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raised.value.param == param
    assert len(raised.value.message) < 300
    assert peak < 4 * MIB


def tools(count: int, num_properties: int = 0) -> list[dict[str, Any]]:
    properties = {
        f"p{i}": {"type": "string", "description": "x" * 20} for i in range(num_properties)
    }
    parameters = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"t{i}", "parameters": parameters}}
        for i in range(count)
    ]


MESSAGE = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Bodies of too many strings are refused before it is known in which field they are.
TOO_MANY: list[tuple[dict[str, Any], str | None]] = [
    ({"logit_bias": {str(i): 1 for i in range(49_000)}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"bad_words": ["a"] * 1025}, "bad_words"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": [1] * 50_000}, "allowed_token_ids"),
    ({"tools": tools(1025)}, "tools"),
    ({"tools": tools(1, 50_000)}, None),
    ({"tools": tools(30, 1600)}, None),
    ({"messages": [MESSAGE] * 16_385}, None),
    ({"messages": [PARTS]}, None),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 16_384}]}, None),
    ({f"unknown{i}": 1 for i in range(16_385)}, None),
    ({"messages": [MESSAGE | {"unknown": 1}] * 16_385}, None),
]


@pytest.mark.parametrize(
    ("fields", "param"), TOO_MANY, ids=[f"{row[1]} {str(row[0])[:30]}" for row in TOO_MANY]
)
def test_rest_refuses_more_of_a_thing_than_any_request_needs(
    gateway: Gateway, fields: dict[str, Any], param: str | None
) -> None:
    reply = gateway.client.post(CHAT, json=chat_body() | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "at most" in reply.text or "up to" in reply.text or "more than" in reply.text


OLLAMA_TOO_MANY: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": [MESSAGE] * 16_385}),
    ("/api/chat", {"messages": [MESSAGE], "tools": tools(1025)}),
    ("/api/chat", {"messages": [MESSAGE], "tools": tools(30, 1600)}),
    ("/api/chat", {"messages": [MESSAGE], "options": {f"o{i}": 1 for i in range(16_385)}}),
    ("/api/chat", {"messages": [MESSAGE], "options": {"stop": ["a"] * 17}}),
    ("/api/chat", {"messages": [MESSAGE], "format": {"enum": [str(i) for i in range(70_000)]}}),
    ("/api/generate", {"prompt": "x" * 600_000}),
    ("/api/generate", {"prompt": "x", "suffix": "y" * 600_000}),
    ("/api/embed", {"input": ["a"] * 1025}),
]


@pytest.mark.parametrize(
    ("path", "fields"),
    OLLAMA_TOO_MANY,
    ids=[f"{path} {list(fields)[-1]}" for path, fields in OLLAMA_TOO_MANY],
)
def test_ollamas_surface_refuses_more_of_a_thing_than_any_request_needs(
    gateway: Gateway, path: str, fields: dict[str, Any]
) -> None:
    reply = gateway.client.post(path, json={"model": MODEL, "stream": False} | fields)
    assert reply.status_code == 400, reply.text[:300]
    assert len(reply.json()["error"]) < 400


def test_rest_accepts_as_much_as_is_allowed(gateway: Gateway) -> None:
    allowed = {
        "logit_bias": {str(i): 1 for i in range(1024)},
        "bad_words": ["zzz"] * 1024,
        "tools": tools(200, 0),
    }
    for name, value in allowed.items():
        reply = gateway.client.post(CHAT, json=chat_body(**{name: value}, temperature=1))
        assert reply.status_code == 200, reply.text[:300]


def grpc_tools(count: int, num_properties: int = 0) -> list[common_pb2.Tool]:
    return [
        common_pb2.Tool(
            name=tool["function"]["name"],
            parameters_json=json.dumps(tool["function"]["parameters"]),
        )
        for tool in tools(count, num_properties)
    ]


USER = common_pb2.ChatMessage(role="user", content="x")
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": dict.fromkeys(range(49_000), 1.0)}, "logit_bias"),
    ({"bad_words": ["a"] * 1025}, "bad_words"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": [1] * 50_000}, "allowed_token_ids"),
]
CONVERSATION: list[tuple[dict[str, Any], str]] = [
    ({"tools": grpc_tools(1025)}, "tools"),
    ({"tools": grpc_tools(30, 1600)}, "tools"),
    ({"messages": [USER] * 16_384}, "messages"),
]


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize(
    ("sampling", "conversation", "param"),
    [(fields, {}, param) for fields, param in SAMPLING]
    + [({}, fields, param) for fields, param in CONVERSATION],
    ids=[param + str(i) for i, (_, param) in enumerate([*SAMPLING, *CONVERSATION])],
)
def test_grpc_refuses_more_of_a_thing_than_any_request_needs(
    stub: Any, sampling: dict[str, Any], conversation: dict[str, Any], param: str
) -> None:
    asked = processor_pb2.Conversation(messages=[USER])
    asked.MergeFrom(processor_pb2.Conversation(**conversation))
    with pytest.raises(grpc.RpcError) as raised:
        stub.Chat(
            inference_pb2.ChatRequest(
                model=MODEL, conversation=asked, sampling=common_pb2.Sampling(**sampling)
            ),
            timeout=60,
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith(f"{param} ha")


def test_a_processor_keeps_nothing_of_large_requests_that_it_refused(text_folder: Path) -> None:
    stage = processor_stage(text_folder)
    with started(stage), grpc.insecure_channel(stage.address) as channel:
        stub: Any = processor_pb2_grpc.ProcessorStub(channel)

        def resident() -> int:
            pages = int(Path(f"/proc/{stage.process.pid}/statm").read_text().split()[1])
            return pages * 4096

        def refused(prompt: processor_pb2.Prompt) -> str:
            asked = processor_pb2.PrepareRequest(
                model=MODEL, prompt=prompt, cache_namespace=b"x" * 16
            )
            with pytest.raises(grpc.RpcError) as raised:
                stub.Prepare(asked, timeout=60)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            return str(raised.value.details())

        stub.Prepare(
            processor_pb2.PrepareRequest(
                model=MODEL, prompt=processor_pb2.Prompt(text="x"), cache_namespace=b"x" * 16
            )
        )
        before = resident()
        for size in ((1, 50_000), (30, 1600), (1024, 20)):
            conversation = processor_pb2.Conversation(messages=[USER], tools=grpc_tools(*size))
            assert refused(processor_pb2.Prompt(conversation=conversation)).startswith(
                "tools have more than"
            )
        # 797 MiB of 218 before sizes were bounded.
        assert resident() - before < 100 * MIB
