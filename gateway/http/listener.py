"""The socket of the REST surface, by uvicorn, and the TLS files for all that clients reach."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headwater.services.runtime.advertise import advertised, joined, listened
from headwater.services.runtime.client_tls import check_client_tls

from ..settings import GatewaySettings
from .connection import UNSENT_BYTES, ConnectionConfig
from .untaken_bytes import SECONDS_PER_CHECK, UntakenBytes

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60
SILENCE_SECONDS = 20
"""Seconds after which a client is probed: one that vanished without closing holds no blocks for
long."""
PATIENCE_SECONDS = 10
"""Seconds that it has to answer."""
UNTAKEN_SECONDS = 60.0
"""Seconds, at least, after which a client is cut off that takes nothing of what was written to
it."""
TICKS_PER_CHECK = round(SECONDS_PER_CHECK / 0.1)
"""Number of calls of uvicorn's `on_tick`, ten a second, between two checks of what is unsent."""


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, which the stage's lifetime has. Cuts off clients
    that take nothing, see `UntakenBytes`."""

    def __init__(self, config: uvicorn.Config, patience: float) -> None:
        """`patience` is the number of seconds in which a client has to take something."""
        super().__init__(config)
        self._untaken = UntakenBytes(patience)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_CHECK == 0:
            self._untaken.check(each.transport for each in self.server_state.connections)
        return await super().on_tick(counter)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files for clients' connections; `client_ca`: whose certificates clients have to show."""

    cert: Path
    key: Path
    client_ca: Path | None

    @classmethod
    def of(cls, settings: GatewaySettings) -> ClientTls | None:
        """TLS of clients by the settings; None without it. Raises `SettingError` for files that
        hold no certificates, or a key of another one."""
        if not settings.tls_cert_file:
            return None
        ca = Path(settings.tls_client_ca_file) if settings.tls_client_ca_file else None
        files = cls(Path(settings.tls_cert_file), Path(settings.tls_key_file), ca)
        check_client_tls(files.cert, files.key, files.client_ca)
        return files

    def for_rest(self) -> dict[str, Any]:
        files: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            files |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return files

    def for_grpc(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        context.set_alpn_protocols(["h2"])
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class RestListener:
    """`address` from the start."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        slow_head_limit: float,
        slow_reader_limit: float,
        max_connections: int,
        on_refused: Callable[[str], None],
        reuse_port: bool,
        tls: ClientTls | None = None,
    ) -> None:
        """`slow_reader_limit` is the number of seconds after which a stream gives up a client that
        takes nothing; other limits are as in `ConnectionConfig`."""
        self._socket = bound(host, port, reuse_port)
        self.address = advertised(host, self._socket.getsockname()[1])
        self._server = _Server(
            ConnectionConfig(
                app,
                slow_head_limit=slow_head_limit,
                max_connections=max_connections,
                on_refused=on_refused,
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
            patience=untaken_limit(slow_reader_limit),
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self, grace: float) -> None:
        """Accepts no more connections; running requests get `grace` seconds."""
        assert self._task is not None
        # NOTE: uvicorn's own limit is whole seconds by its type, and read when the shutdown begins.
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await self._task


def untaken_limit(slow_reader_limit: float) -> float:
    """Seconds in which a client has to take something of what was written to it. A stream says
    first that it is given up."""
    return max(UNTAKEN_SECONDS, 3 * slow_reader_limit)


def bound(host: str, port: int, reuse_port: bool) -> socket.socket:
    """A socket that listens for clients. Raises `OSError`."""
    found = socket.getaddrinfo(
        listened(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit these. A client that is there and reads slowly is not cut off by
    # them.
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
        raise OSError(
            fault.errno, f"cannot listen on {joined(host, port)}: {fault.strerror}"
        ) from None
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening
