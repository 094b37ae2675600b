"""The server of an engine: everything between a core that starts and clients that are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headwater.proto.blocks_pb2_grpc import add_BlocksServicer_to_server
from headwater.proto.engine_pb2_grpc import add_EngineServicer_to_server

from ...runtime.listener import Listener
from ...runtime.metrics_server import metrics_served
from ...runtime.process import Lifetime
from ...runtime.process_facts import ProcessFacts
from ...runtime.tasks import owned_task
from ...runtime.tracing import tracing_to
from ..core.client import CoreClient, CoreFailed
from ..core.messages import OfAdapterReports, OfWeightsReports, Ready, ToPeers
from ..settings import EngineSettings
from .adapters import load_modules
from .facts import EngineFacts
from .grammars import GrammarCompiler
from .kv_events import KvEventLog
from .metrics import collected
from .peers.plane import BlocksServicer, PeerPlane
from .replica import Replica
from .server import EngineServer
from .servicer import EngineServicer
from .weights import EngineWeights

LAST_WORDS_SECONDS = 2.0
"""Time that last frames of ended sessions have to reach their clients."""


async def serve_core(settings: EngineSettings, core: CoreClient, life: Lifetime) -> None:
    """Serves a core that has been started, to the last token. Raises `CoreFailed`,
    `ModelFolderError` or `ModelRefused`."""
    # The core takes longer to start: what the server needs is read meanwhile.
    with contextlib.closing(GrammarCompiler(settings.model_folder)) as compiler:
        await _first_of(core.settled, life.stopping)
        if not life.stopping.is_set():
            await _serve_ready(settings, core, await core.ready(), compiler, life)


async def _serve_ready(
    settings: EngineSettings,
    core: CoreClient,
    ready: Ready,
    compiler: GrammarCompiler,
    life: Lifetime,
) -> None:
    replica = Replica(settings, ready)
    with tracing_to(settings.otlp_endpoint, "engine", replica.replica_id) as tracing:
        events = KvEventLog(replica.incarnation)
        server = EngineServer(
            core, ready, events, replica.model.name, compiler, tracing, settings.role
        )
        core.pass_on(OfAdapterReports, server.adapters.on_report)
        await compiler.read()
        server.adapters.max_bytes = settings.adapter_host_memory
        await load_modules(server.adapters, settings.lora_modules)
        async with _peers_joined(core, ready, replica) as peers:
            await _serve_clients(settings, core, server, replica, peers, life)


@contextlib.asynccontextmanager
async def _peers_joined(
    core: CoreClient, ready: Ready, replica: Replica
) -> AsyncIterator[PeerPlane | None]:
    """Joins the engines that lend blocks to each other; None where no memory is set aside for their
    blocks."""
    if not ready.num_peer_rows:
        yield None
        return
    async with PeerPlane(core, replica.epoch, core.memory.map_records(ready)).running() as peers:
        core.pass_on(ToPeers, peers.on_report)
        yield peers


async def _serve_clients(
    settings: EngineSettings,
    core: CoreClient,
    server: EngineServer,
    replica: Replica,
    peers: PeerPlane | None,
    life: Lifetime,
) -> None:
    weights = EngineWeights(server.send, replica, core.figures.weights)
    core.pass_on(OfWeightsReports, weights.on_report)
    servicer = EngineServicer(server, replica, weights)
    listener = Listener(settings.host, settings.port)
    add_EngineServicer_to_server(servicer, listener.server)
    if peers is not None:
        add_BlocksServicer_to_server(BlocksServicer(peers.leases), listener.server)
    replica.address = settings.advertise or listener.address
    await listener.start()
    try:
        with (
            metrics_served(settings.host, settings.metrics_port, _facts(settings)) as metrics,
            collected(server, replica.model.name),
        ):
            async with (
                owned_task(server.sweep()) as sweep,
                owned_task(server.grammars.run(core.memory.take_mask_reports())) as masks,
            ):
                async with EngineFacts.published(settings, replica, server) as facts:
                    server.open(facts.publish_batch)
                    life.announce(core.pid, grpc=listener.address, **metrics)
                    # If the tasks that cancel starved streams or write masks fail, the engine ends,
                    # since nothing else would do their work.
                    await _first_of(
                        life.stopping,
                        core.gone,
                        servicer.drain_wanted,
                        _ended(sweep),
                        _ended(masks),
                    )
                # Index and membership are left: from here on only late requests come.
                await listener.leave()
                if not life.orphaned:
                    await servicer.drain(settings.drain_limit)
    finally:
        await listener.server.stop(0.0 if life.orphaned else LAST_WORDS_SECONDS)
    if core.gone.is_set():
        raise CoreFailed(f"the engine core ended with status {await core.ended()}")


def _ended(task: asyncio.Task[None]) -> asyncio.Event:
    event = asyncio.Event()
    task.add_done_callback(lambda _: event.set())
    return event


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _facts(settings: EngineSettings) -> ProcessFacts:
    return ProcessFacts(
        "engine",
        disks={"cached prefixes": settings.kv_disk_dir},
        certificates={"stages": settings.stage_tls_cert_file},
    )
