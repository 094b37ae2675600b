"""Clients that read nothing of what they asked for, over REST and gRPC: they cost little, and
nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.gateway.tenancy.grant import LEASE_TOKENS
from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    started,
)
from tests.gateway.request.test_generation import used_blocks

SAMPLING: dict[str, Any] = {"ignore_eos": True, "temperature": 1, "seed": 1} | UNDRAFTED
WITHIN_CREDIT = SAMPLING | {"n": 6, "max_tokens": 1000}
"""Ends without a reader; with log probabilities it is far more than sockets hold."""
PAST_CREDIT = SAMPLING | {"n": 2, "max_tokens": 1100}
"""Stands still without a reader."""
JSON = "Content-Type: application/json"
FORM = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
BLOCK_SIZE = 16
"""Of the engines behind."""
MAX_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def impatient(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    with start_gateway(behind, "--slow-reader-limit=1") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def line_of_files(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> Iterator[Gateway]:
    with start_gateway(behind, "--slow-body-limit=0.3", f"--nats-url={nats_url}") as gateway:
        yield gateway


@pytest.fixture
def with_two_seats(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    engine = engine_stage("--max-num-seqs=2")
    with (
        started(engine),
        start_gateway(
            Behind(behind.processor, behind.output_processor, (engine.address,))
        ) as gateway,
    ):
        yield gateway


def memory_of(gateway: Gateway) -> int:
    """Bytes of a gateway's process."""
    pages = Path(f"/proc/{gateway.stage.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def num_given_up(gateway: Gateway) -> int:
    """Requests over REST whose client left, or was left."""
    lines = gateway.client.get("/metrics").text.splitlines()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if 'status="499"' in line and "_total" in line
    )


@pytest.mark.parametrize(
    ("path", "headers", "begin"),
    [
        ("/v1/chat/completions", f"Content-Length: 4000\r\n{JSON}", ""),
        ("/v1/responses", f"Transfer-Encoding: chunked\r\n{JSON}", ""),
        ("/v1/embeddings", f"Content-Length: 4000\r\nExpect: 100-continue\r\n{JSON}", ""),
        (
            "/v1/files",
            "Content-Length: 4000\r\nContent-Type: multipart/form-data; boundary=b",
            FORM,
        ),
    ],
    ids=["plain", "chunked", "expecting", "file"],
)
def test_a_body_that_trickles_is_refused_in_its_time_however_steadily_it_comes(
    line_of_files: Gateway, path: str, headers: str, begin: str
) -> None:
    host, _, port = line_of_files.rest.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n{begin}".encode()
        )
        received = b""
        arrived = b" "
        try:
            while arrived:
                slow.settimeout(0.05)
                try:
                    arrived = slow.recv(65536)
                    received += arrived
                except TimeoutError:
                    slow.settimeout(60)
                    slow.sendall(b"1\r\n{\r\n" if "chunked" in headers else b"{")
        except ConnectionError:
            # More was sent after it had been closed, and reset by that; what was answered before
            # can still be read.
            with contextlib.suppress(ConnectionError):
                received += b"".join(iter(lambda: slow.recv(65536), b""))
    assert b"HTTP/1.1 408" in received
    assert b"connection: close" in received
    reply = json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]
    assert (reply["type"], reply["code"]) == ("invalid_request_error", "slow_body")


@pytest.mark.parametrize("is_resumable", [False, True], ids=["plain", "resumable"])
def test_a_slow_reader_finds_the_error_behind_the_events_that_were_sent(
    gateway: Gateway, is_resumable: bool
) -> None:
    before = gateway.refused("deadline_exceeded")
    with deaf_over_rest(
        gateway,
        is_resumable,
        SAMPLING | {"n": 6, "max_tokens": 4000},
        "Connection: close\r\nx-headwater-deadline-ms: 1500\r\n",
    ) as deaf:
        gateway.wait_until(lambda: gateway.refused("deadline_exceeded") > before)
        deaf.settimeout(60)
        received = b"".join(iter(lambda: deaf.recv(1 << 20), b""))
    assert b'"code":"deadline_exceeded"' in received[-1000:]


def deaf_over_rest(
    gateway: Gateway, is_resumable: bool, asked: dict[str, Any] = WITHIN_CREDIT, header: str = ""
) -> socket.socket:
    more = {"stream": True, "stream_options": {"resumable": is_resumable}}
    body = json.dumps({"logprobs": 20} | completion_body(**asked) | more).encode()
    host, _, port = gateway.rest.removeprefix("http://").partition(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: "
        f"localhost\r\n{JSON}\r\n{header}Content-Length: {len(body)}\r\n\r\n"
    )
    deaf.sendall(head.encode() + body)
    return deaf


def test_an_engine_stands_still_for_a_client_that_reads_nothing_once_its_first_credit_is_used(
    gateway: Gateway, behind: Behind
) -> None:
    def num_used() -> int:
        return sum(used_blocks(replica) for replica in behind.replicas)

    gateway.wait_until(lambda: num_used() == 0)
    prompt_tokens = gateway.complete(max_tokens=1)["usage"]["prompt_tokens"]
    one_running_and_its_blocks = 1 + -(-(prompt_tokens + LEASE_TOKENS) // BLOCK_SIZE)
    # Without log probabilities what a system takes in a client's place is many thousands of tokens.
    with deaf_over_rest(
        gateway, is_resumable=False, asked=SAMPLING | {"max_tokens": 7000, "logprobs": None}
    ):
        gateway.wait_until(lambda: num_used() >= one_running_and_its_blocks)
        for _ in range(3):
            gateway.complete("Far away", max_tokens=64)
        gateway.wait_until(lambda: num_used() == one_running_and_its_blocks)
    gateway.wait_until(lambda: num_used() == 0)


@pytest.mark.long
def test_clients_that_read_nothing_leave_an_engines_seats_to_others_and_get_the_same_answer_later(
    with_two_seats: Gateway,
) -> None:
    gateway = with_two_seats
    asked = SAMPLING | {"max_tokens": 1100, "logprobs": None}
    whole = gateway.complete(**asked)["choices"][0]["text"]
    with contextlib.ExitStack() as scope:
        # More than there are seats.
        deaf = [
            scope.enter_context(deaf_over_rest(gateway, is_resumable=False, asked=asked))
            for _ in range(3)
        ]
        gateway.wait_until(lambda: gateway.metric("headwater_num_requests_running") == len(deaf))
        assert gateway.complete("Far away", max_tokens=64)["choices"][0]["text"]
        # None of them had to end for it.
        assert gateway.metric("headwater_num_requests_running") == len(deaf)
        for each in deaf:
            each.settimeout(60)
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += each.recv(1 << 20)
            events = [line[6:] for line in received.split(b"\r\n") if line.startswith(b"data: {")]
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


@pytest.mark.parametrize(
    "is_resumable", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "resumable"]
)
def test_clients_that_read_nothing_are_cut_off_and_find_the_error_once_they_read(
    impatient: Gateway, behind: Behind, is_resumable: bool
) -> None:
    alone = impatient.complete("Far away", max_tokens=64)["choices"][0]["text"]
    before = memory_of(impatient)
    given_up = num_given_up(impatient)
    sampling = common_pb2.Sampling(**PAST_CREDIT, logprobs=True, top_logprobs=5)
    asked = inference_pb2.CompleteRequest(
        model=MODEL, text="Once", sampling=sampling, resumable=is_resumable
    )
    # Without the probe its windows stay small: a client of gRPC reads ahead of whoever reads from
    # it.
    with (
        deaf_over_rest(impatient, is_resumable) as deaf,
        grpc.insecure_channel(impatient.grpc, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        unread = stub.CompleteStream(asked)
        # If the machine pauses, the gateway may have cut these clients off already.
        impatient.wait_until(
            lambda: (
                impatient.metric("headwater_num_streams") > 0 or num_given_up(impatient) > given_up
            )
        )
        assert impatient.complete("Far away", max_tokens=64)["choices"][0]["text"] == alone
        impatient.wait_until(lambda: num_given_up(impatient) > given_up, seconds=60)
        impatient.wait_until(
            lambda: impatient.metric("headwater_num_requests_running") == 0, seconds=60
        )
        assert memory_of(impatient) - before < MAX_BYTES
        deaf.settimeout(60)
        received = b"".join(iter(lambda: deaf.recv(1 << 20), b""))
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received
        chunks = list[Any]()
        with pytest.raises(grpc.RpcError) as reported:
            chunks.extend(chunk for chunk in unread)
        status: Any = reported.value
        assert status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status.details() == "the client took nothing of its answer for 1 s"
        if is_resumable:
            again = inference_pb2.ResumeRequest(
                request_id=chunks[0].request_id, after_index=len(chunks)
            )
            chunks += [reply.complete for reply in stub.Resume(again)]
            assert [chunk.chunk_index for chunk in chunks] == list(range(1, len(chunks) + 1))
            assert chunks[-1].usage.completion_tokens == 2200
    impatient.wait_until(lambda: used_blocks(behind.replicas[0]) == 0)
