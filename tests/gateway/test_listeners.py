"""Connections of clients: what becomes of those that ask for nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.gateway import listeners
from headwater.gateway.listeners import RestListener

WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    # Longer than a head may take: what is being answered is not cut off for what comes behind it.
    await asyncio.sleep(0.3)
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    monkeypatch.setattr(listeners, "HEAD_SECONDS", 0.1)
    listener = RestListener(hello, "127.0.0.1", 0, reuse_port=False)
    listener.start()
    host, _, port = listener.address.rpartition(":")
    yield host.removeprefix("http://"), int(port)
    await listener.stop(5.0)


async def test_a_port_in_use_is_named_with_its_address(address: tuple[str, int]) -> None:
    host, port = address
    with pytest.raises(OSError, match=f"cannot listen on {host}:{port}: Address already in use"):
        RestListener(hello, host, port, reuse_port=False)


async def test_who_goes_on_sending_a_body_that_was_answered_is_cut_off(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    async with asyncio.timeout(30):
        answer = await reader.readuntil(b"hello")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
    assert b"200 OK" in answer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("said", [b"", b"GET / HT", WHOLE[:-2], WHOLE + WHOLE[:10]])
async def test_who_does_not_come_to_the_end_of_a_head_is_cut_off(said: bytes, address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(said)
    async with asyncio.timeout(30):
        answer = await reader.read()
    assert answer.endswith(b"hello" if WHOLE in said else b"")
    assert (b"200 OK" in answer) == (WHOLE in said)
    writer.close()
    await writer.wait_closed()
