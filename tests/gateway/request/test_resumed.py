"""Streams that outlive their connection and their gateway, over REST and gRPC, to the byte."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headwater.gateway.request.resumed import bare_id
from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    QUIET,
    THINKER,
    UNDRAFTED,
    Behind,
    Gateway,
    Stage,
    chat_body,
    completion_body,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.small_models import make_thinking_folder

RESUMABLE = {"stream": True, "stream_options": {"resumable": True, "include_usage": True}}
PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "minLength": 300}},
    "required": ["place"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}
THOUGHTFUL = {
    "model": THINKER,
    "messages": [{"role": "user", "content": "Is it cold?"}],
    "seed": 3,
    "max_tokens": 200,
    **UNDRAFTED,
}
GRPC_CHAT = inference_pb2.ChatRequest(
    model=THINKER,
    conversation=processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="Is it cold?")]
    ),
    sampling=common_pb2.Sampling(max_tokens=200, n=2, seed=3, temperature=1, **UNDRAFTED),
    resumable=True,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat_body(max_tokens=40)),
    "two choices": ("/v1/chat/completions", chat_body(n=2, temperature=1, seed=5, max_tokens=40)),
    "log probabilities": (
        "/v1/completions",
        completion_body(max_tokens=40, logprobs=2, echo=False),
    ),
    "usage and ids": (
        "/v1/completions",
        completion_body(max_tokens=40, echo=True, return_token_ids=True)
        | {"stream_options": {"resumable": True, "continuous_usage_stats": True}},
    ),
}


def whole_events(lines: Iterator[str]) -> Iterator[str]:
    """Comments are left out, and what breaks off."""
    event = ""
    for line in lines:
        event += f"{line}\n" if line else ""
        if not line and event:
            if not event.startswith(":"):
                yield event
            event = ""


def blocks(lines: Iterator[str], limit: int | None = None) -> list[str]:
    return list(itertools.islice(whole_events(lines), limit))


def number_of(event: str) -> int:
    return int(event.split("\n", 1)[0].removeprefix("id: "))


def id_of(event: str) -> str:
    reported = json.loads(event.split("data: ", 1)[1])
    return str(reported["id"] if "id" in reported else reported["response"]["id"])


def resumed(gateway: Gateway, shown_id: str, after: int, **headers: str) -> list[str]:
    more = headers | {"last-event-id": str(after)}
    with gateway.client.stream("GET", f"/v1/streams/{shown_id}", headers=more) as reply:
        assert reply.status_code == 200, reply.read()
        return blocks(reply.iter_lines())


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_behind_the_last_event_and_can_be_read_again(
    gateway: Gateway, name: str
) -> None:
    path, body = CASES[name]
    with gateway.client.stream("POST", path, json=RESUMABLE | body) as reply:
        assert reply.status_code == 200, reply.read()
        first = blocks(reply.iter_lines(), 7)
    assert [number_of(event) for event in first] == list(range(1, 8))
    rest = resumed(gateway, id_of(first[0]), 7)
    assert rest[-1].endswith("data: [DONE]\n")
    assert [number_of(event) for event in first + rest] == list(range(1, len(first + rest) + 1))
    assert resumed(gateway, id_of(first[0]), 0) == first + rest


@pytest.fixture(scope="module")
def slow_thinker(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """What stands behind two gateways: a model that thinks and calls tools, a token each 20 ms."""
    folder = make_thinking_folder(
        text_folder, tmp_path_factory.mktemp("models") / THINKER, name=THINKER
    )
    processor = processor_stage(folder)
    output_processor = output_processor_stage(folder)
    flags = (
        "--executor=simulated",
        f"--served-model-name={THINKER}",
        f"--model-folder={folder}",
        "--num-blocks=2048",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_SIMULATED_STEP_SECONDS", "0.02")
        engine = Stage("headwater.services.engine", *flags, *QUIET)
    with started(processor, output_processor, engine):
        yield Behind(processor.address, output_processor.address, (engine.address,))


class Reading(threading.Thread):
    """A client that reads a stream until it ends, or its gateway does."""

    def __init__(self, gateway: Gateway, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._client = gateway.client
        self._path = path
        self._body = body | RESUMABLE
        self.events = list[str]()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            self._client.stream("POST", self._path, json=self._body) as reply,
        ):
            assert reply.status_code == 200, reply.read()
            for event in whole_events(reply.iter_lines()):
                self.events.append(event)


class GrpcReading(threading.Thread):
    """As above, of chunks."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(gateway.grpc)
        self.events = list[Any]()

    def run(self) -> None:
        with contextlib.suppress(grpc.RpcError), self._channel:
            for chunk in inference_pb2_grpc.InferenceStub(self._channel).ChatStream(
                GRPC_CHAT, timeout=60
            ):
                self.events.append(chunk)


def by_choice(events: list[str], shown_id: str) -> dict[int, list[str]]:
    """Each choice's events, without what differs between two requests for the same; how choices
    alternate does."""
    reported: dict[int, list[str]] = {}
    for event in events:
        data = event.split("data: ", 1)[1].replace(bare_id(shown_id), "ID")
        index = re.search(r'"choices":\[{"index":(\d+)', data)
        plain = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', data)
        # The id of a call is made of its request's.
        plain = re.sub(
            r'"tool_calls":\[{"index":0,"id":"[^"]+"', '"tool_calls":[{"index":0,"id":"call"', plain
        )
        reported.setdefault(int(index[1]) if index else -1, []).append(plain)
    return reported


def by_index(chunks: list[Any]) -> dict[int, list[str]]:
    """As above."""
    reported: dict[int, list[str]] = {}
    for chunk in chunks:
        chunk.request_id = ""
        chunk.client_request_id = ""
        chunk.model = ""
        chunk.chunk_index = 0
        reported.setdefault(-1 if chunk.HasField("usage") else chunk.index, []).append(str(chunk))
    return reported


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", THOUGHTFUL),
    "two choices": (
        "/v1/chat/completions",
        THOUGHTFUL | {"n": 2, "temperature": 1, "logprobs": True},
    ),
    "tools": ("/v1/chat/completions", THOUGHTFUL | {"tools": [TOOL], "tool_choice": "required"}),
    "completion": (
        "/v1/completions",
        {
            "model": THINKER,
            "prompt": "Once",
            "seed": 3,
            "max_tokens": 200,
            "logprobs": 1,
            **UNDRAFTED,
        },
    ),
    "response": (
        "/v1/responses",
        {
            "model": THINKER,
            "input": "Is it cold?",
            "seed": 3,
            "max_output_tokens": 200,
            "store": False,
            **UNDRAFTED,
        },
    ),
}


def started_readings(gateway: Gateway) -> dict[str, Any]:
    readings = {name: Reading(gateway, path, body) for name, (path, body) in KINDS.items()}
    readings["gRPC"] = GrpcReading(gateway)
    for reading in readings.values():
        reading.start()
    return readings


@pytest.mark.slow
def test_streams_of_a_gateway_that_was_killed_go_on_through_another(
    slow_thinker: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(slow_thinker) as dying, start_gateway(slow_thinker) as other:
        broken = started_readings(dying)
        other.wait_until(lambda: all(len(reading.events) > 3 for reading in broken.values()))
        dying.stage.kill()
        undisturbed = started_readings(other)
        for name in KINDS:
            broken[name].join()
        # On a busy machine the first may have ended before the last has begun.
        ended = [name for name in KINDS if broken[name].events[-1].endswith("[DONE]\n")]
        assert len(ended) < len(KINDS)
        for name in KINDS:
            shown_id = id_of(broken[name].events[0])
            missing = [] if name in ended else resumed(other, shown_id, len(broken[name].events))
            whole = broken[name].events + missing
            assert whole == resumed(other, shown_id, 0), name
            undisturbed[name].join()
            expected = undisturbed[name].events
            assert by_choice(whole, shown_id) == by_choice(expected, id_of(expected[0])), name
        chunks = broken["gRPC"].events
        with grpc.insecure_channel(other.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.ResumeRequest(
                request_id=chunks[0].request_id, after_index=len(chunks)
            )
            rest = [reply.chat for reply in stub.Resume(request)]
            request.after_index = 0
            assert chunks + rest == [reply.chat for reply in stub.Resume(request)]
        undisturbed["gRPC"].join()
        assert by_index(chunks + rest) == by_index(undisturbed["gRPC"].events)
