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
SECONDS_PER_TICK = 0.1
TICKS_PER_LOOK = 10
"""Seconds between two calls of uvicorn's `on_tick`; number of them between two looks at what is
unsent."""


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, which the stage's lifetime has. Cuts off clients
    that take nothing of what was written to them, also those whose connection is closed: it would
    stay, with all that is unsent."""

    def __init__(self, config: uvicorn.Config, patience: float) -> None:
        """`patience` is the number of seconds in which a client has to take something."""
        super().__init__(config)
        self._patience = patience
        self._unsent: dict[Any, tuple[int, int]] = {}
        """Unsent bytes of connections, and how many checks in turn found the same number."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_LOOK == 0:
            self._look()
        return await super().on_tick(counter)

    def _look(self) -> None:
        before = self._unsent
        self._unsent = {}
        for connection in self.server_state.connections:
            if num_bytes := connection.transport.get_write_buffer_size():
                num_before, num_looks = before.get(connection, (0, 0))
                self._unsent[connection] = (
                    num_bytes,
                    num_looks + 1 if num_bytes == num_before else 0,
                )
        for connection, (_, num_looks) in self._unsent.items():
            # Counts looks, not time: while this process is delayed no client can read anything.
            if num_looks * SECONDS_PER_TICK * TICKS_PER_LOOK > self._patience:
                connection.transport.abort()


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
            # A stream says first that it is given up.
            patience=max(UNTAKEN_SECONDS, 3 * slow_reader_limit),
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
