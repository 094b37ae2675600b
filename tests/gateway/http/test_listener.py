"""Connections of clients: what becomes of those that ask for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headwater.gateway.http import listener as listener_module
from headwater.gateway.http.connection import UNSENT_BYTES
from headwater.gateway.http.listener import RestListener
from headwater.gateway.http.untaken_bytes import UntakenBytes

OTHER_LIMITS: dict[str, Any] = {
    "max_connections": 100,
    "on_refused": lambda *_: None,
    "reuse_port": False,
}
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class UnreadTransport:
    """A transport whose client takes what it takes: so many bytes are unsent at each check."""

    def __init__(self, unsent: list[int]) -> None:
        self._unsent = iter(unsent)
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return next(self._unsent)

    def abort(self) -> None:
        self.is_aborted = True


async def hello(scope: Any, receive: Any, send: Any) -> None:
    # Longer than a head may take: what is being answered is not cut off for what comes behind it.
    await asyncio.sleep(0.8)
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def listening(
    app: Any, slow_reader_limit: float = 0.1, slow_head_limit: float = 60.0
) -> AsyncIterator[tuple[RestListener, str, int]]:
    """A listener of the application, its host and its port."""
    limits = OTHER_LIMITS | {
        "slow_head_limit": slow_head_limit,
        "slow_reader_limit": slow_reader_limit,
    }
    listener = RestListener(app, "127.0.0.1", 0, **limits)
    listener.start()
    host, _, port = listener.address.removeprefix("http://").rpartition(":")
    try:
        yield listener, host, int(port)
    finally:
        await listener.stop(5.0)


@contextlib.contextmanager
def deaf_client(host: str, port: int) -> Iterator[None]:
    """A client that has sent a request and reads nothing."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, port))
        deaf.sendall(WHOLE)
        yield


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    # The first bytes of a client may arrive late on a busy machine.
    async with listening(hello, slow_head_limit=0.5) as (_, host, port):
        yield host, port


async def test_what_a_client_does_not_read_is_not_taken_from_the_handler() -> None:
    num_sent = 0
    is_filled = asyncio.Event()
    has_left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        if scope["path"] == "/hello":
            await hello(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while num_sent < 100 * UNSENT_BYTES and not has_left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 200, "more_body": True})
            num_sent += 200
            if num_sent >= UNSENT_BYTES:
                is_filled.set()

    async with listening(endless) as (_, host, port):
        try:
            with deaf_client(host, port):
                async with asyncio.timeout(60):
                    await is_filled.wait()
                # Others are answered, and nothing moves meanwhile but what was still on its way.
                for _ in range(3):
                    reader, writer = await asyncio.open_connection(host, port)
                    writer.write(WHOLE.replace(b"/", b"/hello", 1))
                    assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
                    writer.close()
                assert num_sent < 4 * UNSENT_BYTES
        finally:
            has_left.set()


@pytest.mark.parametrize("piece_bytes", [16 << 20, 64 << 10], ids=["whole", "in pieces"])
async def test_a_client_that_takes_nothing_of_a_long_answer_is_cut_off(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "UNTAKEN_SECONDS", 0.5)
    num_bytes = 16 << 20
    is_begun = asyncio.Event()
    is_over = asyncio.Event()

    async def long_answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % num_bytes), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        is_begun.set()
        for begin in range(0, num_bytes, piece_bytes):
            is_last = begin + piece_bytes == num_bytes
            await send(
                {"type": "http.response.body", "body": bytes(piece_bytes), "more_body": not is_last}
            )
        is_over.set()

    async with listening(long_answer) as (listener, host, port):
        with deaf_client(host, port):
            async with asyncio.timeout(60):
                await is_begun.wait()
                await is_over.wait()
                while listener._server.server_state.connections:  # noqa: ASYNC110 (the server has no event)
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("unsent", "is_cut_off"),
    [
        ([9] * 4, True),
        ([9] * 3, False),
        ([9, 9, 9, 8, 8, 8], False),
        ([9, 9, 0, 9, 9, 9], False),
        ([0] * 9, False),
    ],
)
def test_a_client_is_cut_off_once_it_has_taken_nothing_in_all_its_time(
    unsent: list[int], *, is_cut_off: bool
) -> None:
    transport = UnreadTransport(unsent)
    untaken = UntakenBytes(patience=2.5)
    for _ in unsent:
        assert not transport.is_aborted
        untaken.check([transport])
    assert transport.is_aborted == is_cut_off


async def test_a_port_in_use_is_named_with_its_address(address: tuple[str, int]) -> None:
    host, port = address
    with pytest.raises(OSError, match=f"cannot listen on {host}:{port}: Address already in use"):
        RestListener(hello, host, port, slow_head_limit=1.0, slow_reader_limit=0.1, **OTHER_LIMITS)


async def test_a_client_that_sends_on_a_body_that_was_answered_is_cut_off(
    address: tuple[str, int],
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    async with asyncio.timeout(60):
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


@pytest.mark.parametrize("written", [b"", b"GET / HT", WHOLE[:-2], WHOLE + WHOLE[:10]])
async def test_a_client_that_never_completes_a_head_is_cut_off(
    written: bytes, address: tuple[str, int]
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(written)
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert (b"200 OK" in answer) == (WHOLE in written)
    if written:
        assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
        assert (
            b'"message":"the line and headers of the request did not come within 0.5 s"' in answer
        )
    else:
        assert answer == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(b"GET / HTTP/1.1\r\n", b"a: b\r\n"), (WHOLE, b"\r\n")],
    ids=["headers", "empty lines"],
)
async def test_a_client_that_trickles_an_incomplete_head_is_cut_off(
    begin: bytes, piece: bytes, address: tuple[str, int]
) -> None:
    reader, writer = await asyncio.open_connection(*address)

    async def trickle() -> None:
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    trickling = asyncio.create_task(trickle())
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            await reader.read()
    trickling.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's method, path and body."""
    body = b""
    more = True
    while more:
        message = await receive()
        body = body + message.get("body", b"")
        more = message.get("more_body", False)
    body = f"{scope['method']} {scope['path']} ".encode() + body
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def connected(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a listener of the application."""
    async with listening(app, slow_reader_limit=30.0) as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.timeout(60):
                yield reader, writer
        finally:
            writer.close()


ASKS_FOR_HTTP2 = (
    b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: "
    b"h2c\r\nhttp2-settings: AAMAAABk\r\n"
)


@pytest.mark.parametrize("parts", [1, 2, 500])
@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: 5\r\n\r\nfirst",
        b"transfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n",
    ],
)
async def test_a_body_comes_with_a_request_that_asks_for_http2(framed: bytes, parts: int) -> None:
    """Java's HttpClient sends such requests. The next request on the connection is answered too."""
    sent = (
        b"POST /a HTTP/1.1\r\n"
        + ASKS_FOR_HTTP2
        + framed
        + b"GET /b HTTP/1.1\r\n"
        + ASKS_FOR_HTTP2
        + b"\r\n"
    )
    size = -(-len(sent) // parts)
    async with connected(echo) as (reader, writer):
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        assert (await reader.readuntil(b"POST /a first")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"GET /b ")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("version", "more"), [(b"1.1", b"connection: close\r\n"), (b"1.0", b"")])
async def test_a_request_that_asks_for_http2_may_be_the_last_of_its_connection(
    version: bytes, more: bytes
) -> None:
    """As `curl --http2 -H 'Connection: close'` asks."""
    head = (
        b"POST /a HTTP/" + version + b"\r\n" + ASKS_FOR_HTTP2 + more + b"content-length: 5\r\n\r\n"
    )
    async with connected(echo) as (reader, writer):
        writer.write(head + b"first")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"POST /a first")


async def test_a_trailer_is_no_header() -> None:
    names = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        names.extend(name for name, _ in scope["headers"])
        await echo(scope, receive, send)

    async with connected(note) as (reader, writer):
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"4\r\nbody\r\n0\r\nx-tenant: other\r\n\r\n")
        await reader.readuntil(b"POST / body")
        # The trailer does not disturb the head of the next request.
        writer.write(WHOLE)
        await reader.readuntil(b"GET / ")
    assert names == [b"host", b"transfer-encoding", b"host"]


@pytest.mark.parametrize(
    "coding",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"transfer-encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding: \r\n",
    ],
)
async def test_a_body_in_more_codings_than_chunks_is_refused(coding: bytes) -> None:
    """Two readers of it would read different bodies."""
    async with connected(echo) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + coding + b"\r\n4\r\nbody\r\n0\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"400 Bad Request") == 1


async def test_a_body_in_chunks_is_read_however_the_coding_is_written() -> None:
    async with connected(echo) as (reader, writer):
        head = b"POST / HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: Chunked \r\n\r\n"
        writer.write(2 * (head + b"4\r\nbody\r\n0\r\n\r\n"))
        await reader.readuntil(b"POST / body")
        await reader.readuntil(b"POST / body")


async def test_many_short_headers_are_too_many() -> None:
    """16,384 of them fit into the bytes that a head may have."""
    async with connected(echo) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 300 + b"\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"the request has too many headers; allowed: 256" in answer


async def test_a_tunnel_is_refused() -> None:
    async with connected(echo) as (reader, writer):
        writer.write(b"CONNECT x:80 HTTP/1.1\r\n" + ASKS_FOR_HTTP2 + b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")


async def test_a_client_that_leaves_is_noticed_though_it_asked_for_more_ahead() -> None:
    has_left = asyncio.Event()

    async def patient(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    async with connected(patient) as (_, writer):
        writer.write(WHOLE + WHOLE)
        await writer.drain()
        writer.close()
        await has_left.wait()
