"""Heads of calls over gRPC, and how many of them a connection carries at once."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from headwater.gateway.public_grpc.listener import (
    HEAD_TABLE_BYTES,
    MAX_HEAD_BYTES,
    MAX_STREAMS,
    SETTINGS_SECONDS,
)
from tests.gateway.processes import Behind, Gateway, Stage, launched, started
from tests.gateway.public_grpc.raw_http2 import (
    ACK,
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
NUM_HEADS = 20


def test_a_connection_says_how_many_calls_it_carries_and_how_long_a_head_may_be(
    gateway: Gateway,
) -> None:
    with RawConnection(gateway.grpc) as connection:
        kind, _, payload = connection.read()
    assert kind == SETTINGS
    settings = dict(struct.iter_unpack(">HI", payload))
    assert settings[MAX_CONCURRENT_STREAMS] == MAX_STREAMS == 128
    assert settings[MAX_HEADER_LIST_SIZE] == MAX_HEAD_BYTES == 16384
    assert settings[HEADER_TABLE_SIZE] == HEAD_TABLE_BYTES == 256


def test_a_header_of_4_kb_is_not_kept_for_references_of_one_byte(gateway: Gateway) -> None:
    """80 heads of 12,000 references took 290 MiB."""
    with RawConnection(gateway.grpc) as connection:
        connection.send(frame(SETTINGS, ACK, 0, b""))
        kept = literal(b"x-pad", b"v" * 3900, is_kept=True)
        connection.send(frame(HEADERS, END_HEADERS, 1, call_head(LIST_MODELS) + kept))
        head = call_head(LIST_MODELS) + FIRST_ENTRY * 12_000
        connection.send(frame(HEADERS, END_HEADERS, 3, head))
        # The connection ends at the first reference to what is not kept.
        assert 3 not in connection.read_to_end()


def test_a_client_that_acknowledges_no_settings_is_left(gateway: Gateway) -> None:
    began = time.monotonic()
    with RawConnection(gateway.grpc) as connection:
        connection.read_to_end()
    assert time.monotonic() - began > SETTINGS_SECONDS - 1


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
