"""Streams of background responses: to clients that read nothing, and those that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.gateway.http import background_responses
from headwater.gateway.http.background_responses import BackgroundResponses
from headwater.gateway.http.http_exchange import Exchange
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.errors import SlowReader, Unauthenticated


async def wait_for_ever(*_: Any) -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_events_are_not_read_for_a_client_that_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_read = 0

    async def events(*_: Any) -> AsyncIterator[dict[str, Any]]:
        nonlocal num_read
        for number in range(1000):
            num_read += 1
            yield {"type": "response.output_text.delta", "sequence_number": number}

    monkeypatch.setattr(background_responses, "follow", events)
    scope = {"method": "GET", "path": "/", "headers": []}
    exchange = Exchange(
        scope, wait_for_ever, wait_for_ever, slow_reader_limit=0.1, slow_body_limit=1.0
    )
    nothing_stored: Any = SimpleNamespace(durable=None)
    unused: Any = None
    responses = BackgroundResponses(nothing_stored, unused, unused, keep_alive=60.0)
    async with asyncio.timeout(60):
        with pytest.raises(SlowReader) as slow:
            await responses._stream(exchange, Caller(tenant=Tenant(id="ada")), "resp_1", after=-1)
        await exchange.refuse(slow.value)
        await exchange.close()
    assert (num_read, exchange.status) == (1, 499)


async def test_a_stream_that_breaks_ends_with_an_error_among_the_events_of_a_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was the error of another API, without a type, where a reader's key was revoked."""

    async def events(*_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.in_progress", "sequence_number": 7}
        raise Unauthenticated("the key is revoked")

    monkeypatch.setattr(background_responses, "follow", events)
    sent = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    scope = {"method": "GET", "path": "/", "headers": []}
    exchange = Exchange(scope, wait_for_ever, send, slow_reader_limit=60.0, slow_body_limit=1.0)
    nothing_stored: Any = SimpleNamespace(durable=None)
    unused: Any = None
    responses = BackgroundResponses(nothing_stored, unused, unused, keep_alive=60.0)
    async with asyncio.timeout(60):
        with pytest.raises(Unauthenticated) as refused:
            await responses._stream(exchange, Caller(tenant=Tenant(id="ada")), "resp_1", after=5)
        await exchange.refuse(refused.value)
        await exchange.close()
    lines = b"".join(sent).split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data:")]
    assert [(each["type"], each["sequence_number"]) for each in events] == [
        ("response.in_progress", 7),
        ("error", 7),
    ]
    assert events[-1]["message"] == "the key is revoked"
