"""The gateway process: `python -m headwater.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import structlog
from starlette.types import ASGIApp

from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.fair_threads import SWITCH_SECONDS
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.metrics_server import metrics_served
from headwater.services.runtime.process import configure_logging, in_one_line, lifetime, run_stage
from headwater.services.runtime.saved_members import SavedMembers
from headwater.services.runtime.served_model import model_key
from headwater.services.runtime.settings import SettingError, read_settings
from headwater.services.runtime.stage_security import stages_secured
from headwater.services.runtime.store import Store
from headwater.services.runtime.tracing import Tracing, tracing_to
from headwater.services.runtime.unread_variables import warn_of_unread_variables
from headwater.services.runtime.usage_log import UsageLog
from headwater.services.runtime.version import full_version

from .adapters.catalogue import AdapterCatalogue
from .adapters.contents import AdapterContents
from .adapters.loading import AdapterLoading
from .adapters.names import AdapterNames
from .adapters.own_adapters import AdapterLimits, OwnAdapters
from .adapters.placement import AdapterPlacement
from .admin.adapters import AdapterAdmin
from .admin.administration import Administration
from .admin.demand import DemandPage
from .admin.models import ModelAdmin
from .admin.purge import Purge
from .admin.replicas import ReplicaAdmin
from .admin.routes import admin_routes
from .admin.tenants import TenantAdmin, make_audit_stream
from .buckets import FAILURES
from .http.app import make_app
from .http.connection_limit import connections_allowed, relayed_connections_allowed
from .http.http_guard import HttpGuard
from .http.listener import ClientTls, RestListener
from .jobs.background.runner import BackgroundRunner
from .jobs.batches.line_caller import LineCaller
from .jobs.batches.runner import Runner
from .jobs.durable import Durable
from .jobs.response_store import ResponseStore
from .jobs.storage_bounds import StorageBounds
from .jobs.tenant_storage import TenantStorage
from .live.cluster_view import ClusterView
from .live.live_feed import LiveFeed
from .live.system_pages import SystemPages
from .public_grpc.listener import GrpcListener
from .request.admission import Admission
from .request.backlogs import Backlogs
from .request.cluster import Cluster
from .request.cold_start_queue import ColdStartQueue
from .request.doubts import Doubts
from .request.metrics import Metrics
from .request.migrations import Migrations
from .request.request_spans import RequestSpans
from .request.timelines import Timelines
from .router.policy import POLICIES
from .router.router import Router
from .settings import GatewaySettings
from .stages.catalogues import Catalogues
from .stages.cluster_demand import ClusterDemand
from .stages.outages import Outages
from .stages.output_sessions import OutputSessions
from .stages.process_metrics import process_metrics
from .stages.stages import Stages
from .storage_limits import StorageLimits, no_own
from .tenancy.accounts import Accounts, ScopesOf, unlimited
from .tenancy.cache_namespace import CacheNamespaces
from .tenancy.directory import TenantDirectory
from .tenancy.gone_tenants import gone_tenants_published
from .tenancy.last_written import LastWritten
from .tenancy.limiter import Limiter
from .tenancy.shared_prompts import SharedPrompts
from .tenancy.snapshot import Snapshot
from .tenancy.tenant_store import TenantStore
from .tenancy.tenants import AdminKeys, KeyedTenants, OpenTenants, Tenants
from .tenancy.virtual_time import VirtualTime

LAST_WORDS = 1.0
"""Seconds for which requests that are cut off at the drain limit may send their error."""


async def serve(settings: GatewaySettings) -> None:
    """Serves from the start to the last answer. Raises `SettingError` for files that cannot be
    used, `OSError` for ports."""
    async with contextlib.AsyncExitStack() as stack:
        life = await stack.enter_async_context(lifetime("gateway"))
        bus = await stack.enter_async_context(Bus.open(settings.nats_url or None))
        name = settings.gateway_id or f"gateway-{secrets.token_hex(4)}"
        epoch = new_epoch()
        tracing = stack.enter_context(tracing_to(settings.otlp_endpoint, "gateway", name))
        store = await stack.enter_async_context(Store.open(settings.redis_url or None))
        cluster = await stack.enter_async_context(
            cluster_behind(settings, bus, store, name, tracing)
        )
        durable = Durable(bus, adopts_unsigned=settings.adopt_unsigned_tenants)
        limits = storage_limits(settings, cluster.tenants)
        storage = TenantStorage(durable, limits)
        responses = ResponseStore(store, settings.response_ttl, limits)
        loading = AdapterLoading(
            cluster.stages.members, cluster.stages.processors, cluster.adapters, cluster.placement
        )
        own = own_adapters(settings, cluster, loading)
        admin = await stack.enter_async_context(
            admin_of(settings, bus, durable, cluster.tenants, responses, own)
        )
        administration = Administration(admin, is_open=not settings.api_key_file)
        models = ModelAdmin(bus, cluster.catalogues, administration)
        demand = await stack.enter_async_context(
            ClusterDemand(bus, name, cluster.demand_by_model).running()
        )
        gateways = await stack.enter_async_context(Members(bus, [Kind.GATEWAY]).running())
        surveyed = ClusterView.open(cluster, bus, gateways, models, has_keys=settings.has_keys)
        view = await stack.enter_async_context(surveyed)
        feed = LiveFeed(cluster, administration, view, settings.slow_reader_limit)
        routes = admin_routes(
            admin,
            models,
            ReplicaAdmin(cluster.stages.members, administration),
            DemandPage(demand),
            AdapterAdmin(
                cluster.stages.members,
                cluster.adapters,
                loading,
                administration,
                settings.adapter_dir,
            ),
        )
        pages = await stack.enter_async_context(
            SystemPages.open(cluster, bus, store, gateways, settings, administration)
        )
        routes += [("GET", "/console/live", feed.watch), *pages.routes()]
        app = make_app(cluster, settings, storage, responses, routes, administration.may_see, own)
        stack.enter_context(process_metrics(settings, cluster.stages.members))
        rest, public = listeners(settings, cluster, app)
        rest.start()
        await public.start()
        member = own_member(settings, name, epoch, rest, public)
        with metrics_served(settings.host, settings.metrics_port) as metrics:
            if settings.adopt_unsigned_tenants:
                await adopt_unsigned(bus, durable)
            async with (
                StorageBounds(
                    bus,
                    settings.storage_bytes,
                    lambda: make_streams(settings, bus, durable, cluster),
                    num_replicas=settings.storage_replicas,
                ).running(),
                Heartbeat.running(bus, lambda: replace(member, without=cluster.outages())),
                batches_run(settings, storage, app),
                background_run(settings, storage, app, responses),
            ):
                life.announce(rest=rest.address, grpc=public.address, **metrics)
                await life.stopping.wait()
            limit = 0.0 if life.orphaned else settings.drain_limit
            await cluster.drain(
                limit,
                asyncio.gather(rest.stop(limit + LAST_WORDS), public.stop(limit + LAST_WORDS)),
            )


def listeners(
    settings: GatewaySettings, cluster: Cluster, app: ASGIApp
) -> tuple[RestListener, GrpcListener]:
    """The two surfaces that clients reach, bound to their ports. Raises `SettingError`,
    `OSError`."""
    shared: dict[str, Any] = {
        "slow_reader_limit": settings.slow_reader_limit,
        "reuse_port": settings.reuse_port,
        "tls": ClientTls.of(settings),
    }
    max_connections = connections_allowed(settings.max_calls)
    rest = RestListener(
        HttpGuard(app, settings, cluster.metrics),
        settings.host,
        settings.port,
        slow_head_limit=settings.slow_head_limit,
        max_connections=max_connections,
        on_refused=cluster.metrics.refused.add,
        **shared,
    )
    cluster.metrics.connections.set_function(lambda: rest.num_connections)
    public = GrpcListener(
        cluster,
        settings.host,
        settings.grpc_port,
        slow_message_limit=settings.slow_message_limit,
        max_message_bytes=settings.max_message_bytes,
        max_text_bytes=settings.max_text_bytes,
        max_calls=settings.max_calls,
        max_connections=relayed_connections_allowed(settings.max_calls, max_connections),
        **shared,
    )
    return rest, public


def own_member(
    settings: GatewaySettings, name: str, epoch: int, rest: RestListener, public: GrpcListener
) -> Member:
    """The member record that this gateway publishes."""
    scheme = "https" if settings.tls_cert_file else "http"
    return Member(
        kind=Kind.GATEWAY,
        replica_id=name,
        epoch=epoch,
        address=public.address,
        rest_url=f"{scheme}://{rest.address}",
        version=full_version(),
    )


async def make_streams(
    settings: GatewaySettings, bus: Bus, durable: Durable, cluster: Cluster
) -> None:
    """Creates the buckets and streams that are missing. Raises what NATS raises."""
    durable.forget()
    await durable.rooms()
    await cluster.adapters.catalogue.make()
    await cluster.placement.contents.make()
    await UsageLog(bus).make()
    if settings.keeps_tenants:
        await TenantStore(bus).make()
        await make_audit_stream(bus)


async def adopt_unsigned(bus: Bus, durable: Durable) -> None:
    """Signs what an earlier version kept, before the gateway announces itself. Tenants are signed
    when read."""
    try:
        await UsageLog(bus).make()
        await UsageLog(bus).adopt()
        await durable.sign_all()
    except (*FAILURES, Unavailable) as failure:
        structlog.get_logger().error("what has no signature was not signed", error=repr(failure))


@contextlib.asynccontextmanager
async def batches_run(
    settings: GatewaySettings, storage: TenantStorage, app: ASGIApp
) -> AsyncIterator[None]:
    """Works on batches inside the `with` block, where there is a NATS and the settings want it."""
    if not settings.nats_url or not settings.batch_concurrency:
        yield
        return
    caller = LineCaller(
        app, concurrency=settings.batch_concurrency, registry=prometheus_client.REGISTRY
    )
    async with Runner(storage, caller, max_line_bytes=settings.max_body_bytes).running():
        yield


@contextlib.asynccontextmanager
async def background_run(
    settings: GatewaySettings, storage: TenantStorage, app: ASGIApp, responses: ResponseStore
) -> AsyncIterator[None]:
    """Computes background responses inside the `with` block, where there is a NATS."""
    if not settings.nats_url:
        yield
        return
    async with BackgroundRunner(storage, app, responses).running():
        yield


@contextlib.asynccontextmanager
async def cluster_behind(
    settings: GatewaySettings, bus: Bus, store: Store, gateway_id: str, tracing: Tracing
) -> AsyncIterator[Cluster]:
    """The cluster of stages, found over the bus and by the seeds."""
    async with (
        tenancy_behind(settings, bus, gateway_id) as (tenants, accounts, fair),
        members_behind(settings, bus) as members,
        router_behind(settings, bus, store, members) as (router, admission, outages),
        Timelines(bus, gateway_id).running() as timelines,
        Catalogues(bus).running() as catalogues,
        adapters_behind(bus, members) as (adapters, placement),
        Doubts(bus, router.peers.epoch, lambda: len(router.peers) > 0).running() as doubts,
    ):
        stages = Stages(members, OutputSessions(gateway_id))
        cold_starts = cold_start_queue(settings, bus, gateway_id, catalogues, stages, router)
        keys = settings.master_key, settings.master_key_file
        namespaces = CacheNamespaces.read(*keys, shared=settings.shared_cache)
        cluster = Cluster(
            stages=stages,
            tenants=tenants,
            accounts=accounts,
            fair=fair,
            namespaces=namespaces,
            shared_prompts=SharedPrompts.read(
                settings.shared_prompt, shared_cache=settings.shared_cache
            ),
            admission=admission,
            router=router,
            catalogues=catalogues,
            adapters=adapters,
            placement=placement,
            cold_starts=cold_starts,
            spans=RequestSpans(tracing, namespaces.master_key),
            metrics=Metrics(prometheus_client.REGISTRY),
            timelines=timelines,
            max_choices=settings.max_choices,
            migrations=Migrations(doubts),
            needs_engine=settings.needs_engine,
            outages=outages.now,
        )
        members.on_change(cluster.apply_change)
        if isinstance(tenants, TenantDirectory):
            tenants.on_change(cluster.end_revoked)
        try:
            async with cold_starts.running():
                yield cluster
        finally:
            await cluster.close()


@contextlib.asynccontextmanager
async def tenancy_behind(
    settings: GatewaySettings, bus: Bus, gateway_id: str
) -> AsyncIterator[tuple[Tenants, Accounts, VirtualTime]]:
    """The tenants, their limits and usage, and their fair shares."""
    async with (
        # A connection of its own to Redis: limits may take longer than a routing hint, and a slow
        # limit must not mark the store of hints as down.
        Store.open(settings.redis_url or None) as counters,
        tenants_of(settings, bus, counters) as (tenants, scopes_of),
    ):
        limiter = Limiter(counters)
        usage = UsageLog(bus)
        share = settings.fail_open_share
        accounts = Accounts(
            limiter, usage, gateway_id=gateway_id, scopes_of=scopes_of, fail_open_share=share
        )
        async with accounts.running(), VirtualTime(counters).running() as fair:
            yield tenants, accounts, fair


@contextlib.asynccontextmanager
async def members_behind(settings: GatewaySettings, bus: Bus) -> AsyncIterator[Members]:
    """The members of the cluster: the seeds, those saved by an earlier gateway, and those that the
    bus names."""
    seeds = {
        Kind.PROCESSOR: settings.processor,
        Kind.OUTPUT_PROCESSOR: settings.output_processor,
        Kind.ENGINE: settings.replica,
    }
    saved = SavedMembers(settings.members_file)
    members = Members(bus, seeds.keys(), seeds, saved=saved.load())
    async with members.running(), saved.keeping(bus, members):
        yield members


@contextlib.asynccontextmanager
async def adapters_behind(
    bus: Bus, members: Members
) -> AsyncIterator[tuple[AdapterNames, AdapterPlacement]]:
    """The names of adapters, and what keeps engines in step with them."""
    async with AdapterCatalogue(bus).running() as catalogue:
        placement = AdapterPlacement(members, catalogue, AdapterContents(bus))
        async with placement.running():
            yield AdapterNames(members, catalogue), placement


@contextlib.asynccontextmanager
async def router_behind(
    settings: GatewaySettings, bus: Bus, store: Store, members: Members
) -> AsyncIterator[tuple[Router, Admission, Outages]]:
    """The router, its queue, and the state of the services that both depend on."""
    registry = prometheus_client.REGISTRY
    feed = IndexFeed(bus, members, store)
    router = Router(
        bus,
        members,
        feed,
        registry=registry,
        score=POLICIES[settings.routing_policy],
        logged_share=settings.log_receipts,
    )
    admission = Admission(
        settings.max_running,
        settings.max_queued,
        has_room=router.capacity.has_room,
        replicas=router.capacity,
    )
    async with (
        feed.running(),
        router.running(),
        Backlogs(bus, router, admission).running(),
        Outages(bus, store, feed, registry).running() as outages,
    ):
        yield router, admission, outages


def cold_start_queue(
    settings: GatewaySettings,
    bus: Bus,
    gateway_id: str,
    catalogues: Catalogues,
    stages: Stages,
    router: Router,
) -> ColdStartQueue:
    return ColdStartQueue(
        bus,
        gateway_id,
        catalogues,
        patience=settings.cold_start_timeout,
        max_waiting=settings.max_queued,
        is_served=lambda model: stages.processors.serves(model) and stages.outputs.serves(model),
        has_replica=lambda model: router.has_replica(model_key(model)),
    )


def own_adapters(
    settings: GatewaySettings, cluster: Cluster, loading: AdapterLoading
) -> OwnAdapters:
    tenants = cluster.tenants
    own = tenants.adapters if isinstance(tenants, TenantDirectory) else no_own
    limits = AdapterLimits(settings.tenant_adapters, settings.tenant_adapter_bytes, own)
    return OwnAdapters(loading, cluster.placement.contents, limits, cluster.long_work)


def storage_limits(settings: GatewaySettings, tenants: Tenants) -> StorageLimits:
    own = tenants.storage if isinstance(tenants, TenantDirectory) else no_own
    return StorageLimits(settings.tenant_file_bytes, settings.tenant_response_bytes, own)


@contextlib.asynccontextmanager
async def tenants_of(
    settings: GatewaySettings, bus: Bus, store: Store
) -> AsyncIterator[tuple[Tenants, ScopesOf]]:
    """The tenants that may call, and their limits."""
    file = KeyedTenants.read(Path(settings.api_key_file)) if settings.api_key_file else None
    if settings.keeps_tenants:
        admins = AdminKeys.read(settings.admin_key, settings.admin_key_file)
        snapshot = Snapshot(settings.tenants_file)
        last_written = LastWritten(
            f"{settings.tenants_file}.times" if settings.tenants_file else "", store
        )
        tenant_store = TenantStore(
            bus, last_written, adopts_unsigned=settings.adopt_unsigned_tenants
        )
        known = TenantDirectory(tenant_store, admins, file, snapshot)
        async with known.running(bus) as directory, gone_tenants_published(bus, directory):
            yield directory, directory.scopes
    elif file is not None:
        yield file, unlimited
    else:
        structlog.get_logger().warning(
            "no keys are set: whoever reaches this gateway is served, by any name"
        )
        yield OpenTenants(), unlimited


@contextlib.asynccontextmanager
async def admin_of(
    settings: GatewaySettings,
    bus: Bus,
    durable: Durable,
    tenants: Tenants,
    responses: ResponseStore,
    adapters: OwnAdapters,
) -> AsyncIterator[TenantAdmin | None]:
    """Administration of tenants inside the `with` block, where tenants are kept."""
    if not isinstance(tenants, TenantDirectory):
        yield None
        return
    admins = AdminKeys.read(settings.admin_key, settings.admin_key_file)
    async with Purge(
        tenants.tenant_store, durable, responses, adapters.drop_all
    ).running() as purge:
        yield TenantAdmin(bus, admins, tenants, UsageLog(bus), purge)


def main() -> None:
    with in_one_line("gateway", SettingError, OSError):
        settings = read_settings(GatewaySettings, sys.argv[1:], prog="headwater serve gateway")
        configure_logging("gateway", settings.log_level)
        warn_of_unread_variables()
        sys.setswitchinterval(SWITCH_SECONDS)
        with stages_secured(settings):
            run_stage(serve(settings))


if __name__ == "__main__":
    main()
