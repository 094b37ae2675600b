"""A short response is one write to the socket, whose head cannot be broken by what is in it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from headwater.gateway.http.cycle import Cycle

LOGGER = logging.getLogger("tests.cycle")


class Transport:
    """A socket that takes everything."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True


def cycle_of(transport: Any, *, method: str = "POST", keep_alive: bool = True) -> Cycle:
    scope: Any = {"type": "http", "method": method}
    return Cycle(
        scope=scope,
        transport=transport,
        flow=FlowControl(transport),
        logger=LOGGER,
        access_logger=LOGGER,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


async def answer(cycle: Cycle, headers: list[tuple[bytes, bytes]], *pieces: bytes) -> None:
    await cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces[:-1]:
        await cycle.send({"type": "http.response.body", "body": piece, "more_body": True})
    await cycle.send({"type": "http.response.body", "body": pieces[-1], "more_body": False})


async def test_a_whole_answer_is_one_write() -> None:
    transport = Transport()
    await answer(cycle_of(transport), [(b"content-length", b"2")], b"{}")
    assert transport.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]


async def test_a_stream_begins_with_its_head_and_first_piece() -> None:
    transport = Transport()
    await answer(cycle_of(transport), [], b"one", b"two", b"")
    assert transport.written == [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"0\r\n\r\n",
    ]


async def test_an_answer_without_keep_alive_says_so_and_closes_the_connection() -> None:
    transport = Transport()
    cycle = cycle_of(transport, keep_alive=False)
    await answer(cycle, [(b"content-length", b"0")], b"")
    assert transport.written == [
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    ]
    assert transport.is_closed


async def test_an_answer_to_head_has_no_body_whatever_its_length_says() -> None:
    transport = Transport()
    await answer(cycle_of(transport, method="HEAD"), [(b"content-length", b"9")], b"")
    assert transport.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"]


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_with_the_end_of_a_line_in_it_is_not_written(value: bytes) -> None:
    transport = Transport()
    with pytest.raises(RuntimeError, match="end of line"):
        await answer(cycle_of(transport), [(b"x-request-id", value)], b"")
    assert transport.written == []


@pytest.mark.parametrize(("body", "word"), [(b"abc", "longer"), (b"a", "shorter")])
async def test_a_body_of_another_length_than_announced_is_a_fault(body: bytes, word: str) -> None:
    with pytest.raises(RuntimeError, match=word):
        await answer(cycle_of(Transport()), [(b"content-length", b"2")], body)
