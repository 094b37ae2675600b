"""The gRPC server of a stage, with the health service and the checks that every call passes."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from . import cluster_key
from .advertise import advertised, joined
from .call_proof import ProofInterceptor
from .channel import server_options
from .grpc_errors import ErrorInterceptor
from .tls import add_port
from .trace_interceptor import TraceInterceptor
from .tracing import NO_TRACING, Tracing

LIVE = "live"
"""Service of the health check that is served from start to end, draining included: the process
answers."""


class Listener:
    """A gRPC server with health; `address` once it listens."""

    def __init__(
        self, host: str, port: int, tracing: Tracing = NO_TRACING, *, service: str = ""
    ) -> None:
        """`service` is the name that health reports, besides the whole server."""
        interceptors: list[grpc.aio.ServerInterceptor] = [
            ProofInterceptor(cluster_key.current()),
            ErrorInterceptor(),
        ]
        if tracing is not NO_TRACING:
            interceptors.append(TraceInterceptor(tracing))
        self.server = grpc.aio.server(interceptors=interceptors, options=server_options())
        self._service = service
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.address = advertised(host, add_port(self.server, joined(host, port)))

    async def start(self) -> None:
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def leave(self) -> None:
        """Tells health checks that no new work is taken."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(
        self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType
    ) -> None:
        for service in {"", self._service}:
            await self._health.set(service, status)
