"""Streams that outlive their connection and their gateway, over REST and gRPC, to the byte."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import GatewayStarter
from tests.gateway.stages import MODEL, THINKER, Behind, Gateway, Stage, chat_body, completion_body

RESUMABLE = {"stream": True, "stream_options": {"resumable": True, "include_usage": True}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
THOUGHTFUL = {"model": THINKER, "messages": [{"role": "user", "content": "Is it cold?"}], "seed": 3, "max_tokens": 48}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat_body(max_tokens=40)),
    "two choices": ("/v1/chat/completions", chat_body(n=2, temperature=1, seed=5, max_tokens=40)),
    "log probabilities": ("/v1/completions", completion_body(max_tokens=40, logprobs=2, echo=False)),
    "usage and ids": (
        "/v1/completions",
        completion_body(max_tokens=40, echo=True, return_token_ids=True)
        | {"stream_options": {"resumable": True, "continuous_usage_stats": True}},
    ),
}


def blocks(lines: Iterator[str], limit: int | None = None) -> list[str]:
    """Whole events, comments left out."""
    events, event = [], ""
    for line in lines:
        if line:
            event += line + "\n"
        elif event:
            if not event.startswith(":"):
                events.append(event)
            event = ""
            if limit is not None and len(events) == limit:
                break
    return events


def number_of(event: str) -> int:
    return int(event.split("\n", 1)[0].removeprefix("id: "))


def id_of(event: str) -> str:
    told = json.loads(event.split("data: ", 1)[1])
    return str(told["id"] if "id" in told else told["response"]["id"])


def resumed(gateway: Gateway, shown_id: str, after: int, **headers: str) -> list[str]:
    more = headers | {"last-event-id": str(after)}
    with gateway.client.stream("GET", f"/v1/streams/{shown_id}", headers=more) as reply:
        assert reply.status_code == 200, reply.read()
        return blocks(reply.iter_lines())


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_behind_the_last_event_and_can_be_read_again(gateway: Gateway, name: str) -> None:
    path, body = CASES[name]
    with gateway.client.stream("POST", path, json=RESUMABLE | body) as reply:
        assert reply.status_code == 200, reply.read()
        first = blocks(reply.iter_lines(), 7)
    assert [number_of(event) for event in first] == list(range(1, 8))
    rest = resumed(gateway, id_of(first[0]), 7)
    assert rest[-1].endswith("data: [DONE]\n")
    assert [number_of(event) for event in first + rest] == list(range(1, len(first + rest) + 1))
    assert resumed(gateway, id_of(first[0]), 0) == first + rest
