"""Connections of gRPC's clients, between their socket and gRPC's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.gateway.http.listener import bound
from headwater.gateway.public_grpc import relay as relay_module
from headwater.gateway.public_grpc.relay import Relay, _Client
from headwater.gateway.tenancy.peers import KEPT, peer_of_call

PIECE = b"x" * 1_000_000
NUM_PIECES = 64
MAX_CONNECTIONS = 2 * KEPT


class Peers(health_pb2_grpc.HealthServicer):
    """Answers with the caller's address in an error."""

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.ABORTED, peer_of_call(context.peer()))


@dataclass(frozen=True, slots=True)
class Running:
    relay: Relay
    port: int
    refused: Counter[str]


@contextlib.asynccontextmanager
async def running(settings_seconds: float = 60.0, patience: float = 60.0) -> AsyncIterator[Running]:
    refused = Counter[str]()
    relay = Relay(
        max_connections=MAX_CONNECTIONS,
        max_head_bytes=1000,
        max_streams=7,
        settings_seconds=settings_seconds,
        patience=patience,
        on_refused=lambda code: refused.update([code]),
    )
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Peers(), server)
    server.add_insecure_port(f"unix:{relay.inner}")
    listening = bound("127.0.0.1", 0, reuse_port=False)
    await server.start()
    await relay.start(listening, None)
    try:
        async with asyncio.timeout(60):
            yield Running(relay, listening.getsockname()[1], refused)
    finally:
        relay.close()
        await server.stop(0)


async def address_seen(channel: grpc.aio.Channel) -> str | None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Check(health_pb2.HealthCheckRequest())
    return raised.value.details()


async def test_grpc_knows_the_address_of_a_relayed_client() -> None:
    async with running() as run, grpc.aio.insecure_channel(f"127.0.0.1:{run.port}") as channel:
        assert await address_seen(channel) == "127.0.0.1"
    assert not run.relay.inner.parent.exists()


async def test_a_client_that_acknowledges_no_settings_is_left() -> None:
    async with running(settings_seconds=0.05) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        # gRPC's settings, and then the end.
        assert await reader.read()
        writer.close()
        # A client that does stays.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{run.port}") as channel:
            await address_seen(channel)
            [client] = run.relay.open
            await asyncio.sleep(0.06)
            assert run.relay.open == {client}


@contextlib.asynccontextmanager
async def unread(run: Running) -> AsyncIterator[_Client]:
    """A connection whose client reads one byte and no more, and has more unsent than is kept."""
    client = socket.create_connection(("127.0.0.1", run.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    with contextlib.closing(client):
        # gRPC's settings.
        assert await asyncio.get_running_loop().sock_recv(client, 1)
        [side] = run.relay.open
        assert side.other is not None
        num_written = 0
        while side.other.transport.is_reading():
            side.transport.write(PIECE)
            num_written += 1
        assert num_written < NUM_PIECES
        yield side


async def until_none_is_open(relay: Relay) -> None:
    while relay.open:  # noqa: ASYNC110 (the relay has no event)
        await asyncio.sleep(0.001)


async def test_a_client_that_neither_acknowledges_nor_reads_is_left() -> None:
    async with running(settings_seconds=0.05) as run, unread(run):
        await until_none_is_open(run.relay)


async def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SECONDS_PER_CHECK", 0.01)
    async with running(patience=0.0) as run, unread(run):
        await until_none_is_open(run.relay)


def test_a_client_that_resets_its_connection_at_once_leaves_no_error() -> None:
    faults = list[Any]()

    async def reset() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with running() as run:
            client = socket.create_connection(("127.0.0.1", run.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Before it is accepted: this thread is the event loop's.
            client.close()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{run.port}") as channel:
                await address_seen(channel)
            assert len(run.relay.open) <= 1

    uvloop.run(reset())
    assert not faults


async def test_the_client_that_has_most_connections_leaves_some_to_others() -> None:
    async with running() as run, contextlib.AsyncExitStack() as scope:

        async def connected(host: str) -> bool:
            """Whether gRPC speaks on a new connection from this address."""
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", run.port, local_addr=(host, 0)
            )
            scope.callback(writer.close)
            with contextlib.suppress(ConnectionError):
                return bool(await reader.read(1))
            return False

        most = MAX_CONNECTIONS - MAX_CONNECTIONS // KEPT
        assert all([await connected("127.0.0.1") for _ in range(most)])
        assert not await connected("127.0.0.1")
        assert run.refused == {"too_many_connections": 1}
        assert await connected("127.0.0.2")


async def test_what_a_client_does_not_read_stays_with_grpc() -> None:
    """Each side stops reading when the other one is not written to."""
    async with running() as run, unread(run) as side:
        assert side.other is not None
        assert not side.other.transport.is_reading()
