"""The socket of the REST surface, by uvicorn, and the TLS files for all that clients reach."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headwater.services.runtime.advertise import advertised, joined, listened
from headwater.services.runtime.settings import SettingError

from ..settings import GatewaySettings
from .http_versions import H2_PREFACE, end_with_connection, h2_refusal, head_without_upgrade, raw_refusal

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60
SILENCE_SECONDS = 20
"""Seconds after which a client is probed: one that vanished without closing holds no blocks for long."""
PATIENCE_SECONDS = 10
"""Seconds that it has to answer."""
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's headers."""
HEAD_TOO_LONG = f"the line and headers of the request are too long; allowed: {MAX_HEAD_BYTES} bytes"
NO_REQUEST = "this is no request of HTTP/1.1, or a doubtful one (its length, a chunk, a header); allowed: HTTP/1.1"
HEAD_SECONDS = 60.0
"""Seconds that a connection may be idle at first, a request have no whole head, or a body come that was answered
already: no client holds a socket for nothing."""
SECONDS_PER_TICK, TICKS_PER_LOOK = 0.1, 10
"""Seconds between two calls of uvicorn's `on_tick`; number of them between two looks at what is unsent."""
UNSENT_BYTES = 16 * 1024
"""Bytes of an answer that the system and the server each keep for a client that does not read. NOTE: without a limit
the system takes megabytes, thousands of tokens that an engine computes for no reader."""


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, which the stage's lifetime has. Cuts off clients that take nothing of
    what was written to them, also those whose connection is closed: it would stay, with all that is unsent."""

    def __init__(self, config: uvicorn.Config, patience: float) -> None:
        """`patience` is the number of seconds in which a client has to take something."""
        super().__init__(config)
        self._patience = patience
        self._unsent: dict[Any, tuple[int, int]] = {}
        """Number of unsent bytes of connections that have some, and the number of looks that found as many."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_LOOK == 0:
            self._look()
        return await super().on_tick(counter)

    def _look(self) -> None:
        before, self._unsent = self._unsent, {}
        for connection in self.server_state.connections:
            if num_bytes := connection.transport.get_write_buffer_size():
                num_before, num_looks = before.get(connection, (0, 0))
                self._unsent[connection] = num_bytes, num_looks + 1 if num_bytes == num_before else 0
        for connection, (_, num_looks) in self._unsent.items():
            # Looks and not time: while this process is held up no client can take anything.
            if num_looks * SECONDS_PER_TICK * TICKS_PER_LOOK > self._patience:
                connection.transport.abort()


class _BoundedHead(HttpToolsProtocol):
    """Limits a request's line and headers: a client that sends more gets 431 and is cut off, one that does not come to
    their end is cut off."""

    _head_bytes = 0
    _in_head = True
    _in_body = False
    _head_limit: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The request that is answered at present, or was last."""
    _refusal = HTTPStatus.BAD_REQUEST, NO_REQUEST

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # as its own caller does
        self.transport.set_write_buffer_limits(UNSENT_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        if self._answered is not None and not self._answered.response_complete:
            # NOTE: uvicorn (0.54) says so to the last request alone, which may wait behind this one.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HEAD_TOO_LONG
            # The parser makes a parser's error of it.
            raise ValueError(HEAD_TOO_LONG)
        if not self._in_body:
            # NOTE: uvicorn (0.54) takes a trailer for a header where both come in one piece. A proxy in front may pass
            # trailers on that it would not pass as headers.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._asks_to_upgrade():
            # The same head comes again without it.
            return
        self._in_head, self._in_body = False, True
        self._head_is_here()
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # Where reading stops, no end of the connection is noticed: it stops behind two requests, not behind one.
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            end_with_connection(self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _asks_to_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT")

    def on_message_complete(self) -> None:
        if self._asks_to_upgrade():
            return
        self._in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None and data.startswith(H2_PREFACE):
            self.transport.write(h2_refusal())
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response(NO_REQUEST)
            return
        if self._in_head and not self.transport.is_closing():
            # One line that does not end is not seen by the parser's callbacks.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > 2 * MAX_HEAD_BYTES:
                self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HEAD_TOO_LONG
                self.send_400_response(HEAD_TOO_LONG)
        else:
            self._unfinished_bytes = 0
        if self._in_body and self.cycle is not None and self.cycle.response_complete:
            # The rest of a body that was answered already: until the next head.
            self._await_head()

    _unfinished_bytes = 0

    def _parse(self, data: memoryview) -> None:
        """Raises `HttpParserError`. Answers a request that asks to speak another protocol as one that does not ask.

        NOTE: the parser (httptools 0.9) takes what follows such a head for the other protocol, and drops a body. Java's
        HttpClient asks for HTTP/2 in this way with every request.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if not self._in_head:
                return
            line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            self.parser.feed_data(head_without_upgrade(line, self.headers))

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser reads no request in."""
        self.transport.write(raw_refusal(*self._refusal))
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_limit is None:
            self._head_limit = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _head_is_here(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _give_up(self) -> None:
        self._head_limit = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            # The answer to the request before is still on its way.
            self._await_head()


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files for clients' connections; `client_ca`: whose certificates clients have to show."""

    cert: Path
    key: Path
    client_ca: Path | None

    @classmethod
    def of(cls, settings: GatewaySettings) -> ClientTls | None:
        """None without TLS. Raises `SettingError` for files that hold no certificates, or a key of another one."""
        if not settings.tls_cert_file:
            return None
        ca = Path(settings.tls_client_ca_file) if settings.tls_client_ca_file else None
        files = cls(Path(settings.tls_cert_file), Path(settings.tls_key_file), ca)
        files._check()
        return files

    def _check(self) -> None:
        """gRPC would say of such files that it cannot listen."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An encrypted key would be asked for at the terminal without a password.
            context.load_cert_chain(self.cert, self.key, password="")
        except ssl.SSLError:
            allowed = "a PEM certificate whose private key, unencrypted PEM, --tls-key-file names"
            raise SettingError("tls_cert_file", str(self.cert), allowed) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError:
                raise SettingError("tls_client_ca_file", str(self.client_ca), "PEM certificates") from None

    def for_rest(self) -> dict[str, Any]:
        files: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            files |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return files

    def for_grpc(self) -> grpc.ServerCredentials:
        ca = self.client_ca.read_bytes() if self.client_ca is not None else None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


class RestListener:
    """`address` from the start."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        slow_reader_limit: float,
        reuse_port: bool,
        tls: ClientTls | None = None,
    ) -> None:
        """`slow_reader_limit` is the number of seconds after which a stream gives up a client that takes nothing."""
        self._socket = _bound(host, port, reuse_port)
        self.address = advertised(host, self._socket.getsockname()[1])
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_BoundedHead,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                **(tls.for_rest() if tls is not None else {}),
            ),
            # A stream says first that it is given up.
            patience=max(HEAD_SECONDS, 3 * slow_reader_limit),
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self, grace: float) -> None:
        """Accepts nothing more; what runs gets `grace` seconds."""
        assert self._task is not None
        # NOTE: uvicorn's own limit is whole seconds by its type, and read when the shutdown begins.
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await self._task


def _bound(host: str, port: int, reuse_port: bool) -> socket.socket:
    """Raises `OSError`."""
    found = socket.getaddrinfo(listened(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit these. A client that is there and reads slowly is not cut off by them.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PATIENCE_SECONDS // 2)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listening.bind(address)
    except OSError as fault:
        listening.close()
        raise OSError(fault.errno, f"cannot listen on {joined(host, port)}: {fault.strerror}") from None
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening
