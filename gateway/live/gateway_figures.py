"""One gateway's figures of requests and replicas: plain data that travels between gateways. No
prompt, no answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.metrics import TenantUse
from .replica_rows import Standing, routed_by_replica, standings
from .request_rows import recent_rows, running_rows

NUM_LOOKED_THROUGH = 400
"""Ended requests among which a tenant's own are looked for."""


Counts = tuple[int, int]
"""Number of requests that wait or run, and how many of them wait for a first replica."""


class TenantFigures(msgspec.Struct):
    """A tenant's running and waiting requests, and its tokens since the gateway started."""

    id: str
    """Name of the tenant."""
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class GatewayFigures(msgspec.Struct):
    """Figures of requests of one gateway, or of several together; of one tenant, or of all."""

    gateway_id: str
    totals: dict[str, float]
    """Counted from the gateway's start, besides `num_running` and `num_waiting`."""
    tenants: dict[str, TenantFigures]
    """Keyed by the tenant's key: names may be given again."""
    models: dict[str, Counts]
    running: list[dict[str, Any]]
    recent: list[dict[str, Any]]
    routed: dict[str, tuple[int, int, int]]
    """See `RoutedByReplica`."""
    standings: dict[str, dict[str, Standing]] = {}
    """See `StandingsByReplica`."""
    event_lags: dict[str, float] = {}
    """Seconds until a change of an engine's cache is known at a gateway, at p99, by gateway; 0: no
    change was received."""


def read_figures(cluster: Cluster, tenant: str | None) -> GatewayFigures:
    """Figures of this gateway. `tenant` is the key of the only tenant whose requests are meant;
    None: all."""
    prompts = [
        each
        for each in cluster.running.prompts()
        if tenant in (None, each.request.caller.tenant.key)
    ]
    tenants = _tenants(cluster, prompts, tenant)
    name = cluster.timelines.gateway_id
    figures = GatewayFigures(
        gateway_id=name,
        totals=cluster_totals(cluster, prompts)
        if tenant is None
        else _own_totals(tenants.values(), prompts),
        tenants=tenants,
        models=cluster.demand_by_model() if tenant is None else _own_demand(prompts),
        running=running_rows(prompts, name),
        recent=recent_rows(cluster.timelines.youngest(NUM_LOOKED_THROUGH, tenant)),
        routed={},
    )
    if tenant is None:
        seen = standings(cluster.router, time.monotonic())
        figures.routed = routed_by_replica(cluster.router)
        figures.standings = {life: {name: standing} for life, standing in seen.items()}
        figures.event_lags = {name: cluster.router.event_lag}
    return figures


def cluster_totals(
    cluster: Cluster, prompts: Iterable[Generation] | None = None
) -> dict[str, float]:
    """Counts of this gateway since its start. Running answers count with their tokens so far."""
    metrics = cluster.metrics
    prompts = cluster.running.prompts() if prompts is None else prompts
    return {
        "num_running": cluster.admission.num_running,
        "num_waiting": cluster.admission.num_queued,
        "prompt_tokens": metrics.prompt_tokens.value(),
        "cached_tokens": metrics.cached_tokens.value(),
        "output_tokens": metrics.generation_tokens.value() + _num_output_tokens(prompts),
        "num_finished": metrics.finished.value(),
        "num_refused": metrics.refused.value(),
        "num_migrated": metrics.migrations.value(),
    }


def _own_totals(
    tenants: Iterable[TenantFigures], prompts: Iterable[Generation]
) -> dict[str, float]:
    names = ("num_running", "num_waiting", "prompt_tokens", "cached_tokens", "output_tokens")
    totals: dict[str, float] = {
        name: sum(getattr(each, name) for each in tenants) for name in names
    }
    totals["output_tokens"] += _num_output_tokens(prompts)
    return totals


def _num_output_tokens(prompts: Iterable[Generation]) -> int:
    return sum(each.num_output_tokens for each in prompts)


def _tenants(
    cluster: Cluster, prompts: Iterable[Generation], tenant: str | None
) -> dict[str, TenantFigures]:
    """Tenants with requests that run or have ended here. A watcher of one tenant gets an entry of
    that tenant in any case."""
    uses = cluster.metrics.tenant_use
    queues = cluster.admission.by_tenant()
    names = {each.request.caller.tenant.key: each.request.caller.tenant.id for each in prompts}
    found = {}
    for key in uses.keys() | names.keys() if tenant is None else {tenant}:
        use, (num_running, num_waiting) = (
            uses.get(key, TenantUse(names.get(key, ""))),
            queues.get(key, (0, 0)),
        )
        found[key] = TenantFigures(
            use.name,
            num_running,
            num_waiting,
            use.prompt_tokens,
            use.cached_tokens,
            use.output_tokens,
        )
    return found


def _own_demand(prompts: Iterable[Generation]) -> dict[str, Counts]:
    return {
        model: (count, 0)
        for model, count in Counter(each.request.model for each in prompts).items()
    }
