"""A gateway's memory stays as it is over ten thousand requests, well or badly ended, by whichever
way they came."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, completion_body

NUM_REQUESTS = 10_000
NUM_BEFORE = 14_000
AT_ONCE = 8
"""Requests that are looked at, and before them, until pools and the timelines that are kept have
their size."""
MOST_BYTES = 600
"""Growth a request. What one leaves behind is a few kilobytes."""
Ask = Callable[[Gateway, Any], object]
RESPONSE = {
    "model": MODEL,
    "input": "Tell me of a river.",
    "max_output_tokens": 4,
    "temperature": 0,
    "store": False,
}
SAMPLING = {"max_tokens": 4, "temperature": 0}


def posted(path: str, body: dict[str, Any], status: int = 200) -> Ask:
    def ask(gateway: Gateway, _: Any) -> None:
        reply = gateway.client.post(path, json=body)
        assert reply.status_code == status, reply.text

    return ask


def conversation(text: str = "Tell me of a river.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def chat(**more: Any) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(
        **{"model": MODEL, "conversation": conversation(), "sampling": SAMPLING} | more
    )


def complete(**more: Any) -> inference_pb2.CompleteRequest:
    return inference_pb2.CompleteRequest(
        **{"model": MODEL, "text": "Once", "sampling": SAMPLING} | more
    )


RESUMABLE = {"stream": True, "stream_options": {"resumable": True}}
EMBED = inference_pb2.EmbedRequest(model=MODEL, inputs=[processor_pb2.Prompt(text="a river")])
ASKED: dict[str, Ask] = {
    "chat": posted("/v1/chat/completions", chat_body(max_tokens=4)),
    "chat, resumable": posted("/v1/chat/completions", chat_body(max_tokens=4, **RESUMABLE)),
    "chat, refused": posted("/v1/chat/completions", chat_body(temperature=9), 400),
    "completions": posted(
        "/v1/completions", completion_body(["a", "b"], max_tokens=4, stream=True)
    ),
    "responses": posted("/v1/responses", RESPONSE),
    "responses, streamed": posted("/v1/responses", RESPONSE | {"stream": True}),
    "responses, resumable": posted("/v1/responses", RESPONSE | RESUMABLE),
    "responses, refused": posted("/v1/responses", RESPONSE | {"temperature": 9}, 400),
    "embeddings": posted("/v1/embeddings", {"model": MODEL, "input": ["a river", "b"]}),
    "Chat": lambda _, stub: stub.Chat(chat()),
    "ChatStream": lambda _, stub: list(stub.ChatStream(chat())),
    "CompleteStream, resumable": lambda _, stub: list(
        stub.CompleteStream(complete(resumable=True))
    ),
    "Complete": lambda _, stub: stub.Complete(complete()),
    "Embed": lambda _, stub: stub.Embed(EMBED),
}


@pytest.fixture(scope="module")
def cluster(behind: Behind, start_gateway: GatewayStarter) -> Iterator[tuple[Gateway, Any]]:
    """A gateway of its own: what others left would be given back here."""
    with start_gateway(behind) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        yield gateway, inference_pb2_grpc.InferenceStub(channel)


def num_bytes(gateway: Gateway) -> float:
    return gateway.metric("process_resident_memory_bytes")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_stays_flat_over_ten_thousand_requests(cluster: tuple[Gateway, Any]) -> None:
    gateway, stub = cluster
    kinds = itertools.cycle(ASKED.values())
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(count: int) -> None:
            for asked in [pool.submit(next(kinds), gateway, stub) for _ in range(count)]:
                asked.result()

        ask(NUM_BEFORE)
        before = num_bytes(gateway)
        ask(NUM_REQUESTS)
    grown = num_bytes(gateway) - before
    assert grown < MOST_BYTES * NUM_REQUESTS
