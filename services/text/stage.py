"""Runs the processor and the output processor: listens, joins the cluster, reports health, stops in
order."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from ..runtime.advertise import check_host
from ..runtime.bus import Bus
from ..runtime.heartbeat import Heartbeat
from ..runtime.listener import Listener
from ..runtime.member import Kind, Member, new_epoch
from ..runtime.metrics_server import metrics_served
from ..runtime.prober import SERVICES
from ..runtime.process import lifetime
from ..runtime.process_facts import ProcessFacts
from ..runtime.security_settings import StageSecuritySettings
from ..runtime.served_model import ServedModel
from ..runtime.settings import SettingError, require, setting
from ..runtime.tracing import NO_TRACING, Tracing
from ..runtime.version import full_version


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStageSettings(StageSecuritySettings):
    """Settings that the processor and the output processor share."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "gRPC port; 0: any")
    advertise: str = setting(
        "", "host:port by which others reach it, behind a proxy say; empty: where it listens"
    )
    replica_id: str = setting("", "stable name of this process; default: a random one")
    nats_url: str = setting(
        "", "NATS server that carries membership; none: gateways need the address"
    )
    redis_url: str = setting("", "accepted like on every stage; text needs no store")
    model_folder: tuple[str, ...] = setting((), "converted model folder (repeatable)")
    served_model_name: tuple[str, ...] = setting(
        (), "name of the folder at the same place (default: its own)"
    )
    drain_limit: float = setting(30.0, "seconds that running requests are given at shutdown")
    metrics_port: int = setting(0, "port of /metrics; 0: any, -1: none")
    otlp_endpoint: str = setting(
        "", "OpenTelemetry collector that gets spans, http://host:port (gRPC); none: no spans"
    )
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        check_host(self.host)
        require(0 <= self.port <= 65535, "port", self.port, "0…65535")
        require(-1 <= self.metrics_port <= 65535, "metrics_port", self.metrics_port, "-1…65535")
        if self.drain_limit < 0:
            raise SettingError("drain_limit", self.drain_limit, "at least 0")


async def serve_stage(
    settings: TextStageSettings,
    kind: Kind,
    models: Sequence[ServedModel | None],
    add_servicer: Callable[[grpc.aio.Server], None],
    leave: Callable[[], None] = lambda: None,
    tracing: Tracing = NO_TRACING,
    *,
    num_running: Callable[[], int],
    shared_bus: Bus | None = None,
) -> None:
    """Runs a stage: it becomes ready, is told to stop, ends optional work by `leave`, and the rest
    within the drain limit.

    `num_running` returns the number of requests that the stage works on. It opens a bus unless the
    stage has one.
    """
    opened = (
        Bus.open(settings.nats_url or None)
        if shared_bus is None
        else contextlib.nullcontext(shared_bus)
    )
    async with lifetime(kind.value.replace("_", "-")) as life, opened as bus:
        listener = Listener(settings.host, settings.port, tracing, service=SERVICES[kind])
        add_servicer(listener.server)
        await listener.start()
        name = settings.replica_id or f"{kind.value}-{secrets.token_hex(4)}"
        epoch = new_epoch()
        facts = ProcessFacts(
            kind.value.replace("_", "-"), certificates={"stages": settings.stage_tls_cert_file}
        )
        with metrics_served(settings.host, settings.metrics_port, facts) as metrics:
            async with contextlib.AsyncExitStack() as presence:
                for i, model in enumerate(models):
                    replica_id = name if i == 0 else f"{name}-{i}"
                    address = settings.advertise or listener.address
                    member = Member(
                        kind=kind,
                        replica_id=replica_id,
                        epoch=epoch,
                        address=address,
                        model=model,
                        version=full_version(),
                    )
                    # A process with several models tells its requests once.
                    describe = functools.partial(
                        _described, member, num_running if i == 0 else None
                    )
                    await presence.enter_async_context(Heartbeat.running(bus, describe))
                life.announce(grpc=listener.address, **metrics)
                await life.stopping.wait()
            await listener.leave()
            leave()
            await listener.server.stop(grace=0.0 if life.orphaned else settings.drain_limit)


def _described(member: Member, num_running: Callable[[], int] | None) -> Member:
    return member if num_running is None else replace(member, num_running=num_running())
