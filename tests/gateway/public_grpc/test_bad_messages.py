"""Requests that gRPC refuses: status and the name of the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.bad_sampling import SAMPLING, SAMPLING_IDS, VOCAB_SIZE
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway


def chat_request(**fields: Any) -> inference_pb2.ChatRequest:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="Hello")]
    )
    sampling = common_pb2.Sampling(**({"max_tokens": 8, "temperature": 0} | fields))
    return inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=sampling)


GRPC_ROWS: list[tuple[str, Any, grpc.StatusCode, str]] = [
    ("Chat", inference_pb2.ChatRequest(model="nobody"), grpc.StatusCode.NOT_FOUND, "model"),
    ("Chat", inference_pb2.ChatRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "messages"),
    (
        "Chat",
        inference_pb2.ChatRequest(
            model=MODEL, conversation={"messages": [{"role": "king", "content": "x"}]}
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "messages[0].role",
    ),
    (
        "Chat",
        inference_pb2.ChatRequest(
            model=MODEL,
            conversation={
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "f g"}],
            },
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "tools[0].function.name",
    ),
    (
        "Chat",
        inference_pb2.ChatRequest(
            model=MODEL, conversation={"messages": [{"role": "user", "content": "x"}]}, priority=-1
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "priority",
    ),
    (
        "Complete",
        inference_pb2.CompleteRequest(model=MODEL, text="x", priority=2**31 - 1),
        grpc.StatusCode.INVALID_ARGUMENT,
        "priority",
    ),
    (
        "Complete",
        inference_pb2.CompleteRequest(model=MODEL),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
    (
        "Complete",
        inference_pb2.CompleteRequest(model=MODEL, token_ids={"ids": [VOCAB_SIZE]}),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
    (
        "Complete",
        inference_pb2.CompleteRequest(model=MODEL, text="a " * 9000),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
    (
        "Embed",
        inference_pb2.EmbedRequest(
            model=MODEL, inputs=[processor_pb2.Prompt(text="x")], pooling=99
        ),  # type: ignore[arg-type] # enums of proto3 are open
        grpc.StatusCode.INVALID_ARGUMENT,
        "pooling",
    ),
    (
        "Tokenize",
        inference_pb2.TokenizeRequest(model=MODEL),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt",
    ),
    (
        "Detokenize",
        inference_pb2.DetokenizeRequest(model=MODEL, token_ids=[VOCAB_SIZE]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "tokens",
    ),
]


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def _first_of(reply: Any) -> Any:
    return next(reply) if hasattr(reply, "__next__") else reply


def refusal(call: Any, request: Any) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, and the field that its details name."""
    with pytest.raises(grpc.RpcError) as raised:
        _first_of(call(request, timeout=60))
    failure: Any = raised.value
    field = error_details_pb2.BadRequest()
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(failure)
    for detail in status.details if status is not None else ():
        detail.Unpack(field)
        detail.Unpack(info)
    return failure.code(), field.field_violations[
        0
    ].field if field.field_violations else info.metadata["param"]


@pytest.mark.parametrize(("name", "value", "param"), SAMPLING, ids=SAMPLING_IDS)
def test_grpc_refuses_what_the_sampling_contract_refuses(
    stub: Any, name: str, value: Any, param: str
) -> None:
    for call in (stub.Chat, stub.ChatStream):
        assert refusal(call, chat_request(**{name: value})) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            param,
        )


@pytest.mark.parametrize(
    ("method", "request_", "code", "param"), GRPC_ROWS, ids=[f"{r[0]} {r[3]}" for r in GRPC_ROWS]
)
def test_grpc_names_the_field_of_a_bad_request(
    stub: Any, method: str, request_: Any, code: grpc.StatusCode, param: str
) -> None:
    assert refusal(getattr(stub, method), request_) == (code, param)


def test_grpc_refuses_a_message_of_ten_megabytes(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.Complete(inference_pb2.CompleteRequest(model=MODEL, text="a" * (10 << 20)), timeout=60)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_takes_messages_as_long_as_bodies(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with (
        start_gateway(behind, f"--max-body-bytes={6 << 20}") as gateway,
        grpc.insecure_channel(gateway.grpc) as channel,
    ):
        tokenize = inference_pb2_grpc.InferenceStub(channel).Tokenize
        shorter, longer = (
            inference_pb2.TokenizeRequest(
                model=MODEL, prompt=processor_pb2.Prompt(text="a" * (size << 20))
            )
            for size in (5, 7)
        )
        # Tokenize has a limit of its own, which the service names.
        assert refusal(tokenize, shorter)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal(tokenize, longer)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
