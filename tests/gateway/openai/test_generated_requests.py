"""Requests that nobody would write: generated from our own description, cut off, half closed, with
strange headers.

Whatever comes, the gateway answers in its envelope and goes on: no 500, no stream left, no hang. It
comes from one tenant, within its limits; another one asks beside it and is answered as if it were
alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.gateway.conftest import GatewayStarter
from tests.gateway.neighbour import Neighbour, tenant_key
from tests.gateway.processes import (
    MODEL,
    Behind,
    Gateway,
    chat_body,
    completion_body,
    engine_stage,
    processor_stage,
    started,
)

STATUSES = {200, 400, 404, 405, 413, 415, 429}
ADMIN = "admin-key-of-the-house"
LIMITS = {"requests_per_minute": 1_000_000, "tokens_per_minute": 100_000_000, "concurrency": 32}
BOUNDS = {"limits": LIMITS, "file_bytes": 20_000_000, "response_bytes": 5_000_000}
"""Of the tenant that does its worst."""


@pytest.fixture(scope="module")
def short_line(
    text_folder: Path,
    behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    shared_redis_url: str,
) -> Iterator[Gateway]:
    """Contexts of 128 tokens, so that no answer is long. Its client is the tenant that does its
    worst."""
    processor = processor_stage(text_folder, "--max-model-len=128")
    engine = engine_stage("--max-model-len=128")
    with started(processor, engine):
        short = Behind(processor.address, behind.output_processor, (engine.address,))
        # It warns of every unknown field, and nobody reads its log here.
        flags = (
            f"--nats-url={nats_url}",
            f"--redis-url={shared_redis_url}",
            f"--admin-key={ADMIN}",
        )
        with start_gateway(short, *flags, "--log-level=error") as gateway:
            gateway.client.headers["authorization"] = (
                f"Bearer {tenant_key(gateway, ADMIN, **BOUNDS)}"
            )
            yield gateway


@pytest.fixture
def neighbour(short_line: Gateway) -> Neighbour:
    return Neighbour(short_line, tenant_key(short_line, ADMIN))


def key_of(gateway: Gateway) -> dict[str, str]:
    return {"authorization": gateway.client.headers["authorization"]}


def is_idle(gateway: Gateway) -> bool:
    return (
        gateway.metric("headwater_num_streams")
        == gateway.metric("headwater_num_requests_running")
        == 0
    )


def check_described_requests(gateway: Gateway, neighbour: Neighbour, num_examples: int) -> None:
    """Every operation of /openapi.json with bodies that fit its schema."""
    with neighbour.asking():
        ask_as_described(gateway, num_examples)
    gateway.wait_until(lambda: is_idle(gateway))


def ask_as_described(gateway: Gateway, num_examples: int) -> None:
    description = schemathesis.openapi.from_url(
        f"{gateway.rest}/openapi.json", headers=key_of(gateway)
    )
    for found in description.get_all_operations():
        operation = found.ok()

        @seed(7)
        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            reply = case.call(base_url=gateway.rest, headers=key_of(gateway), timeout=60)
            assert reply.status_code in STATUSES, (reply.status_code, reply.text, case.body)

        check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_what_the_description_allows_is_answered_or_refused(
    short_line: Gateway, neighbour: Neighbour
) -> None:
    check_described_requests(short_line, neighbour, 2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800)
def test_much_of_what_the_description_allows_is_answered_or_refused(
    short_line: Gateway, neighbour: Neighbour
) -> None:
    check_described_requests(short_line, neighbour, 400)


PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
BODIES = [
    chat_body(max_tokens=4),
    chat_body(stream=True, max_tokens=4, tools=[{"type": "function", "function": {"name": "f"}}]),
    completion_body(max_tokens=4, stream=True, n=2, temperature=1),
    {"model": MODEL, "input": ["a", "b"]},
    {"model": MODEL, "input": "a", "stream": True, "max_output_tokens": 4},
    {
        "model": MODEL,
        "system": [{"type": "text", "text": "a"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 4,
        "stream": True,
    },
    {"model": MODEL, "prompt": "a"},
    {"model": MODEL, "tokens": [5]},
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    2**64,
    1e308,
    "",
    "\ud83d\ude42" * 9,
    [],
    {},
    [[[]]],
    {"a": {"b": [None]}},
    "\x00",
]
HEADERS = [
    "authorization",
    "x-tenant",
    "x-priority",
    "x-request-id",
    "traceparent",
    "x-headwater-deadline-ms",
    "accept",
]
ODD = [
    b"",
    b"\xff\xfe",
    b"a" * 4000,
    b"0",
    b"-1",
    b"99999999999",
    b"Bearer",
    b'";drop',
    b"\xe2\x82\xac",
]


def mutated(body: dict[str, Any], dice: random.Random) -> bytes:
    """A good body with one value, one byte or its end gone wrong."""
    changed = json.loads(json.dumps(body))
    match dice.randrange(4):
        case 0:
            changed[dice.choice([*changed, "stop", "n", "logit_bias", "tools", "text"])] = (
                dice.choice(VALUES)
            )
        case 1:
            return json.dumps(changed).encode()[: dice.randrange(200)]
        case 2:
            data = bytearray(json.dumps(changed).encode())
            data[dice.randrange(len(data))] = dice.randrange(256)
            return bytes(data)
    return json.dumps(changed).encode()


def check_mutations(gateway: Gateway, dice: random.Random) -> None:
    body = mutated(dice.choice(BODIES), dice)
    headers = [(b"content-type", b"application/json")]
    if dice.random() < 0.5:
        # An odd `authorization` takes the place of the client's.
        headers.append((dice.choice(HEADERS).encode(), dice.choice(ODD)))
    reply = gateway.client.post(dice.choice(PATHS), content=body, headers=headers)
    assert reply.status_code in STATUSES | {401, 403, 422, 504}, (
        reply.status_code,
        reply.text,
        body,
        headers,
    )


def check_broken_connections(gateway: Gateway, dice: random.Random) -> None:
    """A request over a bare socket that stops speaking, stops listening or leaves, somewhere."""
    url = httpx.URL(gateway.rest)
    body = json.dumps(dice.choice(BODIES)).encode()
    head = (
        f"POST {dice.choice(PATHS)} HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        "application/json\r\n"
    )
    head += f"authorization: {key_of(gateway)['authorization']}\r\n"
    data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with (
        socket.create_connection((url.host, url.port or 80), timeout=5) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(data[: dice.randrange(len(data))] if dice.random() < 0.5 else data)
        match dice.randrange(3):
            case 0:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.2)
                connection.recv(65536)
            case 1:
                connection.recv(dice.randrange(1, 64))


def fuzz(gateway: Gateway, neighbour: Neighbour, seed: int, rounds: Iterable[object]) -> None:
    """Sends the requests of a seed: one that is whole and one that breaks off in each round."""
    dice = random.Random(seed)
    num_sent = 0
    with neighbour.asking():
        for _ in rounds:
            check_mutations(gateway, dice)
            check_broken_connections(gateway, dice)
            num_sent += 2
    print(f"{num_sent} requests and connections")
    gateway.wait_until(lambda: is_idle(gateway))
    assert gateway.chat(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_bodies_headers_and_connections_that_go_wrong_break_nothing(
    short_line: Gateway, neighbour: Neighbour
) -> None:
    fuzz(short_line, neighbour, 0, range(8))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_of_what_goes_wrong_break_nothing(
    short_line: Gateway, neighbour: Neighbour
) -> None:
    """Other requests each time: HEADWATER_FUZZ_SEED sends those of a run that failed again."""
    seed = int(os.environ.get("HEADWATER_FUZZ_SEED") or random.randrange(2**32))
    print(f"HEADWATER_FUZZ_SEED={seed}")
    end = time.monotonic() + 600
    fuzz(
        short_line,
        neighbour,
        seed,
        itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()),
    )
