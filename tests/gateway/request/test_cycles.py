"""Requests leave the collector of cycles next to nothing, well or badly ended, by whichever way they came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, completion_body

NUM_REQUESTS = 20
FEW = 3
"""Objects a request, of those that a server makes on its own."""
OF_GRPC = 12
"""Most of them are made by gRPC's own server, of any call."""
Ask = Callable[[Gateway, Any], object]
RESPONSE = {"model": MODEL, "input": "Tell me of a river.", "max_output_tokens": 4, "temperature": 0, "store": False}
SAMPLING = {"max_tokens": 4, "temperature": 0}


def posted(path: str, body: dict[str, Any], status: int = 200) -> Ask:
    def ask(gateway: Gateway, _: Any) -> None:
        reply = gateway.client.post(path, json=body)
        assert reply.status_code == status, reply.text

    return ask


def conversation(text: str = "Tell me of a river.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def chat(**more: Any) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(**{"model": MODEL, "conversation": conversation(), "sampling": SAMPLING} | more)


def complete(**more: Any) -> inference_pb2.CompleteRequest:
    return inference_pb2.CompleteRequest(**{"model": MODEL, "text": "Once", "sampling": SAMPLING} | more)


RESUMABLE = {"stream": True, "stream_options": {"resumable": True}}
EMBED = inference_pb2.EmbedRequest(model=MODEL, inputs=[processor_pb2.Prompt(text="a river")])
ASKED: dict[str, tuple[Ask, int]] = {
    "chat": (posted("/v1/chat/completions", chat_body(max_tokens=4)), FEW),
    "chat, resumable": (posted("/v1/chat/completions", chat_body(max_tokens=4, **RESUMABLE)), FEW),
    "chat, refused": (posted("/v1/chat/completions", chat_body(temperature=9), 400), FEW),
    "completions": (posted("/v1/completions", completion_body(["a", "b"], max_tokens=4, stream=True)), FEW),
    "responses": (posted("/v1/responses", RESPONSE), FEW),
    "responses, streamed": (posted("/v1/responses", RESPONSE | {"stream": True}), FEW),
    "responses, resumable": (posted("/v1/responses", RESPONSE | RESUMABLE), FEW),
    "responses, refused": (posted("/v1/responses", RESPONSE | {"temperature": 9}, 400), FEW),
    "embeddings": (posted("/v1/embeddings", {"model": MODEL, "input": ["a river", "b"]}), FEW),
    "Chat": (lambda _, stub: stub.Chat(chat()), OF_GRPC),
    "ChatStream": (lambda _, stub: list(stub.ChatStream(chat())), OF_GRPC),
    "CompleteStream, resumable": (lambda _, stub: list(stub.CompleteStream(complete(resumable=True))), OF_GRPC),
    "Complete": (lambda _, stub: stub.Complete(complete()), OF_GRPC),
    "Embed": (lambda _, stub: stub.Embed(EMBED), OF_GRPC),
}


@pytest.fixture(scope="module")
def line(behind: Behind, start_gateway: GatewayStarter) -> Iterator[tuple[Gateway, Any]]:
    """A gateway of its own: what others left would be collected here."""
    with start_gateway(behind) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        yield gateway, inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize(("ask", "most"), ASKED.values(), ids=ASKED)
def test_a_request_leaves_the_collector_of_cycles_next_to_nothing(
    line: tuple[Gateway, Any], ask: Ask, most: int
) -> None:
    def collected() -> float:
        return line[0].metric("python_gc_objects_collected_total")

    def collected_of_each() -> float:
        before = collected()
        for _ in range(NUM_REQUESTS):
            ask(*line)
        return (collected() - before) / NUM_REQUESTS

    # What is left of the start, or of the requests before, may be found meanwhile.
    assert any(collected_of_each() <= most for _ in range(3))
