"""Streams of background responses to clients that read nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.gateway.http import background_responses
from headwater.gateway.http.background_responses import BackgroundResponses
from headwater.gateway.http.http_exchange import Exchange
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.errors import SlowReader


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
