"""The socket that clients of gRPC connect to. It passes their bytes on to gRPC's own, which is a
file that this user alone may open, and bounds connections by client and heads of calls."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..http.connection_limit import TooManyConnections
from ..http.listener import BACKLOG
from ..http.untaken_bytes import SECONDS_PER_CHECK, UntakenBytes
from ..tenancy.peers import SharedPlaces, peer_of
from .client_frames import ClientFrames, HeadTooLong, with_max_streams

UNSENT_BYTES = 64 * 1024
"""Bytes that wait for either side before the other one is not read."""


class Relay:
    """Connections of clients, each with one to gRPC. gRPC knows the client of a connection by the
    name of its other end, see `peer_of_call`."""

    def __init__(
        self,
        *,
        max_connections: int,
        max_head_bytes: int,
        max_streams: int,
        settings_seconds: float,
        patience: float,
        on_refused: Callable[[str], None],
    ) -> None:
        """`max_streams` is the number of calls that a client of one connection hears to have open
        at once; `settings_seconds` is the time in which a client agrees on TLS, and then
        acknowledges gRPC's settings; `patience` is the number of seconds in which a client takes
        something of what was written to it; `on_refused` gets the code of the error that a
        connection is refused with."""
        # NOTE: a socket's name has at most 103 bytes; the folder of `TMPDIR` may be too long.
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-", dir="/tmp")
        self.inner = Path(self._folder.name) / "grpc"
        """Socket on which gRPC listens."""
        self.max_head_bytes = max_head_bytes
        self.max_streams = max_streams
        self.settings_seconds = settings_seconds
        self.on_refused = on_refused
        self.places = SharedPlaces(max_connections)
        self.open = set[_Client]()
        self._server: asyncio.Server | None = None
        self._untaken = UntakenBytes(patience)
        self._next_check: asyncio.TimerHandle | None = None

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accepts connections on a socket that listens."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Client(self),
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=self.settings_seconds if tls is not None else None,
            backlog=BACKLOG,
        )
        self._check_untaken()

    def connection_to_grpc(self, client: str) -> socket.socket:
        """New connection to gRPC, named by a client's address. Raises `OSError`."""
        name = self.inner.with_name(client)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.setblocking(False)
            made.bind(str(name))
            name.unlink()
            made.connect(str(self.inner))
        except OSError:
            made.close()
            raise
        return made

    def _check_untaken(self) -> None:
        # NOTE: gRPC's end of a connection is not seen while nothing is read from it.
        self._untaken.check(each.transport for each in self.open)
        loop = asyncio.get_running_loop()
        self._next_check = loop.call_later(SECONDS_PER_CHECK, self._check_untaken)

    def accept_no_more(self) -> None:
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Ends all connections."""
        self.accept_no_more()
        if self._next_check is not None:
            self._next_check.cancel()
        for client in list(self.open):
            client.transport.close()
        self._folder.cleanup()


class _Side(asyncio.Protocol):
    """One of the two connections. A side that is not read is not written to for long either."""

    transport: Any
    """NOTE: uvloop's are no `asyncio.Transport`."""
    other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(UNSENT_BYTES)

    def pause_writing(self) -> None:
        assert self.other is not None
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        assert self.other is not None
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class _Grpc(_Side):
    """The connection to gRPC."""

    def __init__(self, client: _Client) -> None:
        self.other = client
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._client.other = self

    def data_received(self, data: bytes) -> None:
        if self._client.is_held:
            # gRPC begins with its settings, which are acknowledged once they are there.
            data = with_max_streams(data, self._client.relay.max_streams)
            self._client.may_send()
        self._client.transport.write(data)


class _Client(_Side):
    """The connection of a client."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._frames = ClientFrames(relay.max_head_bytes)
        self._peer = ""
        self._held: bytes | None = b""
        """Bytes that wait for gRPC's settings; None: these have come."""
        self._connecting: asyncio.Task[object] | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # NOTE: uvloop (0.23) has no name for a client that has reset its connection meanwhile.
        host, *_ = transport.get_extra_info("peername") or ("",)
        self._peer = peer_of(host)
        self.relay.open.add(self)
        self.relay.places.take(self._peer)
        if self.relay.places.num_surplus(self._peer) > 0:
            self.relay.on_refused(TooManyConnections(self.relay.places.num_places).code)
            self.transport.abort()
            return
        if not host:
            self.transport.abort()
            return
        try:
            to_grpc = self.relay.connection_to_grpc(host)
        except OSError:
            # gRPC has stopped, or takes no more connections.
            self.transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(
            loop.create_unix_connection(lambda: _Grpc(self), sock=to_grpc)
        )
        self._limit = loop.call_later(self.relay.settings_seconds, self._give_up)

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def may_send(self) -> None:
        """Lets the client's bytes go to gRPC."""
        held = self._held
        assert held is not None
        self._held = None
        self.data_received(held)
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            # NOTE: not where the connection is made, behind which uvloop (0.22) begins to read.
            self.transport.pause_reading()
            self._held += data
            return
        assert self.other is not None
        try:
            self.other.transport.write(self._frames.forwarded(data))
        except HeadTooLong:
            self.transport.close()
        if self._limit is not None and self._frames.has_acknowledged:
            self._limit.cancel()
            self._limit = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.relay.open.discard(self)
        self.relay.places.give_back(self._peer)
        if self._limit is not None:
            self._limit.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        self._limit = None
        # NOTE: a close would wait until the client reads what was written to it.
        self.transport.abort()
