"""The two sockets that clients reach: REST by uvicorn, public gRPC with health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from headwater.gateway.line import Line
from headwater.gateway.public_grpc import InferenceService
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.advertise import advertised
from headwater.services.grpc_errors import ErrorInterceptor

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60
SILENCE_SECONDS = 20
"""After which a client is asked whether it is there: one that vanished without a word holds no blocks for long."""
PATIENCE_SECONDS = 10
"""With its answer."""
PING_OPTIONS = (
    ("grpc.keepalive_time_ms", SILENCE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PATIENCE_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PATIENCE_SECONDS * 1000),
    # Clients may ping as well, within reason.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: the stage's lifetime has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RestListener:
    """`address` from the start."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, reuse_port: bool) -> None:
        self._socket = _bound(host, port, reuse_port)
        self.address = advertised(host, self._socket.getsockname()[1])
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
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
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit these. A client that is there and reads slowly is not cut off by them.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PATIENCE_SECONDS // 2)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    bound.bind(address)
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound


class GrpcListener:
    """The public service; `address` from the start."""

    def __init__(self, line: Line, host: str, port: int, *, reuse_port: bool) -> None:
        options = (("grpc.so_reuseport", int(reuse_port)), *PING_OPTIONS)
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        self._health = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(line), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.address = advertised(host, self._server.add_insecure_port(f"{host}:{port}"))

    async def start(self) -> None:
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace: float) -> None:
        """Health says so first; calls that run get `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
