"""What both text stages do around their service: listen, tell the cluster, tell health, leave in order."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from .. import cluster_key
from ..advertise import advertised, joined
from ..bus import Bus
from ..call_proof import ProofInterceptor
from ..channel import server_options
from ..grpc_errors import ErrorInterceptor
from ..heartbeat import Heartbeat
from ..member import Kind, Member, new_epoch
from ..prober import SERVICES
from ..runtime import lifetime
from ..served_model import ServedModel
from ..settings import SettingError, setting
from ..stage_security import StageSecuritySettings
from ..tls import add_port
from ..trace_interceptor import TraceInterceptor
from ..tracing import NO_TRACING, Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStageSettings(StageSecuritySettings):
    """What the processor and the output processor are both told."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "gRPC port; 0: any")
    advertise: str = setting("", "host:port by which others reach it, behind a proxy say; empty: where it listens")
    replica_id: str = setting("", "stable name of this process; default: a random one")
    nats_url: str = setting("", "NATS server that carries membership; none: gateways need the address")
    redis_url: str = setting("", "accepted like on every stage; text needs no store")
    model_folder: tuple[str, ...] = setting((), "converted model folder (repeatable)")
    served_model_name: tuple[str, ...] = setting((), "name of the folder at the same place (default: its own)")
    drain_limit: float = setting(30.0, "seconds that running requests are given at shutdown")
    metrics_port: int = setting(0, "port of /metrics; 0: any, -1: none")
    otlp_endpoint: str = setting("", "OpenTelemetry collector that gets spans, http://host:port (gRPC); none: no spans")
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError("port", self.port, "0…65535")
        if not -1 <= self.metrics_port <= 65535:
            raise SettingError("metrics_port", self.metrics_port, "-1…65535")
        if self.drain_limit < 0:
            raise SettingError("drain_limit", self.drain_limit, "at least 0")


class Listener:
    """A gRPC server with health; `address` once it listens."""

    def __init__(self, host: str, port: int, tracing: Tracing = NO_TRACING, *, service: str = "") -> None:
        """`service` is what its health is told of, by name, beside that of the whole."""
        interceptors: list[grpc.aio.ServerInterceptor] = [ProofInterceptor(cluster_key.current()), ErrorInterceptor()]
        if tracing is not NO_TRACING:
            interceptors.append(TraceInterceptor(tracing))
        self.server = grpc.aio.server(interceptors=interceptors, options=server_options())
        self._service, self._health = service, health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.address = advertised(host, add_port(self.server, joined(host, port)))

    async def start(self) -> None:
        await self.server.start()
        await self._tell(health_pb2.HealthCheckResponse.SERVING)

    async def leave(self) -> None:
        """Tells health checks that no new work is taken."""
        await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _tell(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for service in {"", self._service}:
            await self._health.set(service, status)


async def serve_stage(
    settings: TextStageSettings,
    kind: Kind,
    models: Sequence[ServedModel | None],
    add_servicer: Callable[[grpc.aio.Server], None],
    leave: Callable[[], None] = lambda: None,
    tracing: Tracing = NO_TRACING,
    *,
    shared_bus: Bus | None = None,
) -> None:
    """The life of a stage: ready, told to stop, `leave` (end what need not go on), the rest within the drain limit.

    It opens a bus unless the stage has one.
    """
    opened = Bus.open(settings.nats_url or None) if shared_bus is None else contextlib.nullcontext(shared_bus)
    async with lifetime(kind.value.replace("_", "-")) as life, opened as bus:
        listener = Listener(settings.host, settings.port, tracing, service=SERVICES[kind])
        add_servicer(listener.server)
        await listener.start()
        name, epoch = settings.replica_id or f"{kind.value}-{secrets.token_hex(4)}", new_epoch()
        with metrics_served(settings.host, settings.metrics_port) as metrics:
            async with contextlib.AsyncExitStack() as presence:
                for i, model in enumerate(models):
                    replica_id = name if i == 0 else f"{name}-{i}"
                    address = settings.advertise or listener.address
                    member = Member(kind=kind, replica_id=replica_id, epoch=epoch, address=address, model=model)
                    await presence.enter_async_context(Heartbeat.running(bus, functools.partial(_same, member)))
                life.announce(grpc=listener.address, **metrics)
                await life.stopping.wait()
            await listener.leave()
            leave()
            await listener.server.stop(grace=0.0 if life.orphaned else settings.drain_limit)


def _same(member: Member) -> Member:
    return member


@contextlib.contextmanager
def metrics_served(host: str, port: int) -> Iterator[dict[str, str]]:
    """Serves /metrics for the length of a scope; yields its address, nothing where port is -1."""
    if port < 0:
        yield {}
        return
    server, thread = prometheus_client.start_http_server(port, host)
    try:
        yield {"metrics": joined(host, server.server_port)}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
