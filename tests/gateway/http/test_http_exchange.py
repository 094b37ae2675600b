"""A client that leaves while its answer is computed ends the work, once, and not after it is
done."""

from __future__ import annotations

import asyncio
import gzip
import io
import threading
from collections.abc import Coroutine, MutableMapping
from typing import Any

import pytest

from headwater.gateway.http.content_encoding import PIECE_BYTES
from headwater.gateway.http.http_exchange import Exchange
from headwater.gateway.long_work import LONG_BODY_BYTES, NUM_NATIVE_THREADS, LongWork
from headwater.gateway.settings import BODY_BYTES_PER_SECOND
from headwater.services.runtime.errors import ClientGone, SlowBody, SlowReader


class Server:
    """Its `receive` pauses without waiting for anything, then waits for what `said` brings."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[str] = asyncio.Queue()
        self.num_received = 0

    async def receive(self) -> MutableMapping[str, Any]:
        await asyncio.sleep(0)
        kind = await self.sent.get()
        self.num_received += 1
        return {"type": kind}


def exchange_of(server: Server) -> Exchange:
    scope = {"method": "POST", "path": "/", "headers": []}
    return Exchange(
        scope, server.receive, lambda message: None, slow_reader_limit=1.0, slow_body_limit=1.0
    )


async def test_a_file_is_not_held_for_a_client_that_takes_nothing_of_it() -> None:
    started = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()
        started.append(message["status"])

    scope = {"method": "GET", "path": "/", "headers": []}
    exchange = Exchange(scope, Server().receive, send, slow_reader_limit=0.01, slow_body_limit=1.0)
    with pytest.raises(SlowReader) as refused:
        async with asyncio.timeout(60):
            await exchange.reply_file(io.BytesIO(b"content"), 7)
    await exchange.refuse(refused.value)
    assert started == [200]


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (0, "only 0 bytes of the request's body came within 0.01 s"),
        (
            100 * BODY_BYTES_PER_SECOND,
            "nothing of the request's body came for 0.01 s, behind 1638400 bytes",
        ),
    ],
    ids=["at its start", "behind much of it"],
)
async def test_a_body_that_stops_is_given_up_after_one_limit_however_much_of_it_came(
    first: int, sentence: str
) -> None:
    sent = iter([{"type": "http.request", "body": bytes(first), "more_body": True}])

    async def receive() -> MutableMapping[str, Any]:
        for message in sent:
            return message
        return await asyncio.Future()

    scope = {"method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    exchange = Exchange(scope, receive, ignore, slow_reader_limit=1.0, slow_body_limit=0.01)
    with pytest.raises(SlowBody, match=f"^{sentence}$"):
        await asyncio.wait_for(exchange.body(limit=2 * first), 60)


async def ignore(message: MutableMapping[str, Any]) -> None:
    """Takes what an exchange sends."""


async def until_quiet() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def answer(exchange: Exchange, work: asyncio.Event) -> None:
    async def wait() -> None:
        await work.wait()

    await exchange.unless_client_leaves(wait(), silence=60.0, on_silence=lambda: None)


async def test_work_ends_when_the_client_leaves_behind_whatever_it_sent_before() -> None:
    server = Server()
    answering = asyncio.create_task(answer(exchange_of(server), asyncio.Event()))
    for kind in ("http.request", "http.request"):
        server.sent.put_nowait(kind)
        await until_quiet()
        assert not answering.done()
    server.sent.put_nowait("http.disconnect")
    with pytest.raises(ClientGone):
        await answering
    assert server.num_received == 3


async def test_work_that_is_done_leaves_the_servers_messages_alone() -> None:
    server = Server()
    for num_passes in range(5):
        work = asyncio.Event()
        answering = asyncio.create_task(answer(exchange_of(server), work))
        for _ in range(num_passes):
            await asyncio.sleep(0)
        work.set()
        await answering
    server.sent.put_nowait("http.disconnect")
    await until_quiet()
    assert server.sent.qsize() == 1


async def test_work_that_is_cancelled_is_not_taken_for_a_client_that_left() -> None:
    answering = asyncio.create_task(answer(exchange_of(Server()), asyncio.Event()))
    await until_quiet()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_what_a_compressed_body_becomes_is_decoded_in_turns_of_its_tenant() -> None:
    long_work = LongWork()
    may_end = threading.Event()
    held = [
        asyncio.create_task(long_work.native(f"t{i}", 1, lambda: may_end.wait(60)))
        for i in range(NUM_NATIVE_THREADS)
    ]
    await asyncio.sleep(0)

    def body(num_bytes: int) -> Coroutine[Any, Any, bytes]:
        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": gzip.compress(bytes(num_bytes))}

        headers = [(b"content-encoding", b"gzip"), (b"content-type", b"application/json")]
        scope = {"method": "POST", "path": "/", "headers": headers}
        limits = {"slow_reader_limit": 1.0, "slow_body_limit": 1.0}
        return Exchange(scope, receive, ignore, long_work=long_work, **limits).body(1 << 22)

    # No turn is needed for what is short.
    assert await body(PIECE_BYTES - 1) == bytes(PIECE_BYTES - 1)
    long = asyncio.create_task(body(3 * PIECE_BYTES))
    await asyncio.sleep(0.05)
    assert not long.done()
    may_end.set()
    assert await long == bytes(3 * PIECE_BYTES)
    await asyncio.gather(*held)
    long_work.close()


async def test_a_long_reply_is_built_in_a_turn_of_its_tenant_and_a_short_one_at_once() -> None:
    long_work = LongWork()
    may_end = threading.Event()
    held = asyncio.create_task(long_work.by_size("", LONG_BODY_BYTES, may_end.wait, 60))
    await asyncio.sleep(0)
    builders: dict[int, threading.Thread] = {}
    bodies: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        bodies.append(message.get("body", b""))

    async def reply(num_bytes: int) -> None:
        def build() -> int:
            builders[num_bytes] = threading.current_thread()
            return num_bytes

        scope = {"method": "POST", "path": "/", "headers": []}
        limits = {"slow_reader_limit": 1.0, "slow_body_limit": 1.0}
        exchange = Exchange(scope, Server().receive, send, long_work=long_work, **limits)
        await exchange.reply_built(num_bytes, build)

    long = asyncio.create_task(reply(LONG_BODY_BYTES))
    await reply(1)
    assert bodies == [b"", b"1"]
    assert builders == {1: threading.current_thread()}
    may_end.set()
    await asyncio.gather(long, held)
    assert bodies == [b"", b"1", b"", b"%d" % LONG_BODY_BYTES]
    assert builders[LONG_BODY_BYTES] is not threading.current_thread()
    long_work.close()
