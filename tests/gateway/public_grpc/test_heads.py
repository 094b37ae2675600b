"""Heads of calls over gRPC, and how many of them a connection carries at once."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headwater.gateway.public_grpc.listener import (
    MAX_ENCODED_HEAD_BYTES,
    MAX_HEAD_BYTES,
    MAX_STREAMS,
)
from headwater.proto import inference_pb2, inference_pb2_grpc
from tests.gateway.processes import Behind, Gateway, Stage, launched, started
from tests.gateway.public_grpc.raw_http2 import (
    CONTINUATION,
    END_HEADERS,
    FIRST_ENTRY,
    HEADER_TABLE_SIZE,
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    SETTINGS,
    RawConnection,
    call_head,
    frame,
    literal,
)

LIST_MODELS = "/headwater.v1.Inference/ListModels"
NUM_HEADS = 3
RESOURCE_EXHAUSTED = b"\x0bgrpc-status\x018"
"""gRPC's own answer to a head that is too long, as HPACK."""


def test_a_connection_says_how_many_calls_it_carries_and_how_long_a_head_may_be(
    gateway: Gateway,
) -> None:
    with RawConnection(gateway.grpc) as connection:
        kind, _, payload = connection.read()
    assert kind == SETTINGS
    settings = dict(struct.iter_unpack(">HI", payload))
    assert settings[MAX_CONCURRENT_STREAMS] == MAX_STREAMS == 128
    assert settings[MAX_HEADER_LIST_SIZE] == MAX_HEAD_BYTES == 16384
    # Clients may write heads by HTTP/2's own default before they have read this.
    assert HEADER_TABLE_SIZE not in settings


def test_the_limit_of_heads_holds_before_a_client_has_acknowledged_it(gateway: Gateway) -> None:
    """A head of 450,000 short headers held the gateway's interpreter for 0.4 s."""
    with RawConnection(gateway.grpc) as connection:
        kept = literal(b"x-pad", b"v", is_kept=True)
        head = call_head(LIST_MODELS) + kept + FIRST_ENTRY * 1000
        for number in range(NUM_HEADS):
            connection.send(frame(HEADERS, END_HEADERS, 1 + 2 * number, head))
        answers = dict[int, bytes]()
        while len(answers) < NUM_HEADS:
            kind, stream, payload = connection.read()
            if kind == HEADERS:
                answers.setdefault(stream, payload)
    assert all(RESOURCE_EXHAUSTED in answer for answer in answers.values())


def test_a_connection_ends_at_a_head_that_is_longer_on_the_wire(gateway: Gateway) -> None:
    with RawConnection(gateway.grpc) as connection:
        connection.send(frame(HEADERS, 0, 1, call_head(LIST_MODELS)))
        for _ in range(MAX_ENCODED_HEAD_BYTES // 16_000 + 1):
            connection.send(frame(CONTINUATION, 0, 1, literal(b"x-pad", b"v" * 15_980)))
        assert 1 not in connection.read_to_end()


async def test_a_client_of_grpc_sends_its_key_and_8_kb_of_headers(gateway: Gateway) -> None:
    headers = (
        ("authorization", "Bearer sk-a"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        *((f"x-pad-{i}", "v" * 980) for i in range(8)),
    )
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(3):
            # From the second call on headers refer to the connection's table.
            reply = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=headers)
            assert reply.models


async def test_calls_beyond_those_of_a_connection_wait_and_none_is_refused(
    gateway: Gateway,
) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.ListModels(inference_pb2.ListModelsRequest()) for _ in range(4 * MAX_STREAMS)]
        replies = await asyncio.gather(*calls)
    assert all(reply.models for reply in replies)


@pytest.fixture
def served_gateway(behind: Behind) -> Iterator[Gateway]:
    """A gateway that `headwater serve` has started."""
    flags = ("serve", "gateway", "--port=0", "--grpc-port=0", *behind.flags())
    stage = Stage("headwater.services.cli", *flags, start=launched)
    with started(stage), Gateway(stage) as gateway:
        gateway.wait_until(gateway.is_ready)
        yield gateway


def test_heads_of_references_are_refused_without_a_line_in_the_log_for_each(
    served_gateway: Gateway,
) -> None:
    with RawConnection(served_gateway.grpc) as connection:
        kept = literal(b"x-pad", b"v" * 3900, is_kept=True)
        connection.send(frame(HEADERS, END_HEADERS, 1, call_head(LIST_MODELS) + kept))
        head = call_head(LIST_MODELS) + FIRST_ENTRY * 12_000
        for number in range(NUM_HEADS):
            connection.send(frame(HEADERS, END_HEADERS, 3 + 2 * number, head))
        refused = set[int]()
        while len(refused) < NUM_HEADS:
            kind, stream, _ = connection.read()
            if kind == HEADERS and stream > 1:
                refused.add(stream)
    assert served_gateway.chat()["choices"]
    assert not served_gateway.stage.says("hpack_encoder.cc")
