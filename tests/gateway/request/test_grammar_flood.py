"""A tenant that floods the checks of grammars, and a neighbour whose answers have a schema."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.gateway.processes import THINKER, Gateway

NUM_FLOODING = 16
NUM_ASKED = 8
_numbers = itertools.count()


def refused_schema(number: int) -> dict[str, Any]:
    """Computes until the limit on its time ends it."""
    return {"patternProperties": {f"^[a-z]{{{i},{i + 1}}}x{i}.*y{number}$": {} for i in range(300)}}


def slow_schema(number: int) -> dict[str, Any]:
    """Compiles in a second or so of a core."""
    return {
        "patternProperties": {f"^[a-z]{{{i},{i + 1}}}x{i}.*y{number}$": {} for i in range(90)},
        "maxProperties": 0,
    }


def plain_schema(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"const": number}}, "required": ["a"]}


def ask(client: httpx.Client, schema: dict[str, Any]) -> httpx.Response:
    return client.post(
        "/v1/chat/completions",
        json={
            "model": THINKER,
            "messages": [{"role": "user", "content": "a river"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema},
            },
            "max_tokens": 40,
        },
    )


def client_of(gateway: Gateway, tenant: str) -> httpx.Client:
    return httpx.Client(base_url=gateway.rest, headers={"x-tenant": tenant}, timeout=60.0)


def asked_seconds(client: httpx.Client) -> list[float]:
    """Seconds of each answer to a schema that is new. Raises `AssertionError` for a refusal."""
    seconds = []
    for _ in range(NUM_ASKED):
        began = time.monotonic()
        reply = ask(client, plain_schema(next(_numbers)))
        seconds.append(time.monotonic() - began)
        assert reply.status_code == 200, (reply.status_code, reply.text)
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("schema", [refused_schema, slow_schema])
def test_a_flood_of_grammars_neither_delays_nor_refuses_those_of_a_neighbour(
    schema: Callable[[int], dict[str, Any]], thinker: Gateway
) -> None:
    is_over = threading.Event()
    statuses: Counter[int] = Counter()
    faults: list[str] = []

    def flood() -> None:
        with client_of(thinker, "flood") as client:
            while not is_over.is_set():
                reply = ask(client, schema(next(_numbers)))
                statuses[reply.status_code] += 1
                if reply.status_code != 200:
                    faults.append(reply.text)
                if reply.status_code in (429, 503):
                    assert int(reply.headers["retry-after"]) >= 1

    with client_of(thinker, "neighbour") as client:
        ask(client, plain_schema(0))
        alone = asked_seconds(client)
        flooding = [threading.Thread(target=flood) for _ in range(NUM_FLOODING)]
        for each in flooding:
            each.start()
        try:
            # Long enough for the checks and the compiler to be full.
            time.sleep(3)
            beside = asked_seconds(client)
        finally:
            is_over.set()
            for each in flooding:
                each.join()
    print(json.dumps({"alone": alone, "beside": beside, "flood": statuses}))
    # In the order of arrival each of them waited for the whole flood, ten seconds and more.
    assert statistics.median(beside) < 2 * statistics.median(alone) + 0.2
    assert not any("processor is gone" in fault for fault in faults)
    if schema is slow_schema:
        assert not statuses[400], faults
