"""One moment of a cluster for people: plain data, within what a watcher may see.

Requests, prefixes, trust and the index' lag are those of all gateways; engines and stages report to
each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.proto.events_pb2 import CatalogueEntry
from headwater.services.runtime import errors
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members

from ..admin.models import ModelAdmin
from ..request.cluster import Cluster
from ..tenancy.tenants import Tenant
from .adapter_rows import adapter_rows
from .cluster_prefixes import ClusterPrefixes, PrefixSurvey
from .findings import cluster_findings
from .gateway_figures import Counts, GatewayFigures, read_figures
from .gateway_prefixes import Block, GatewayPrefixes, read_prefixes
from .gateway_survey import GatewaySurvey
from .merged_figures import merge
from .replica_rows import replica_rows, stage_rows
from .tenant_rows import tenant_rows

STATES = {
    CatalogueEntry.STATE_LOADING: "loading",
    CatalogueEntry.STATE_SERVING: "serving",
    CatalogueEntry.STATE_UNLOADING: "unloading",
}
FigureSurvey = GatewaySurvey[str | None, GatewayFigures]
"""Asks for the figures of the tenant with a key; None: of all."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A watcher and the tenant whose rows it sees; None: it sees all tenants, and the processes."""

    caller: str
    tenant: Tenant | None


class ClusterView:
    def __init__(
        self,
        cluster: Cluster,
        gateways: Members,
        figures: FigureSurvey,
        prefixes: ClusterPrefixes,
        models: ModelAdmin,
        *,
        has_keys: bool,
    ) -> None:
        """`gateways`: the members of that kind, which a cluster does not follow for itself."""
        self._cluster = cluster
        self._gateways = gateways
        self._figures = figures
        self._prefixes = prefixes
        self._models = models
        self._has_keys = has_keys

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, cluster: Cluster, bus: Bus, gateways: Members, models: ModelAdmin, *, has_keys: bool
    ) -> AsyncIterator[ClusterView]:
        """A view that queries the other gateways, and answers their queries, within the context."""
        name = cluster.timelines.gateway_id
        figures: FigureSurvey = GatewaySurvey(
            bus,
            gateways,
            name,
            "figures",
            partial(read_figures, cluster),
            (str | None, GatewayFigures),
        )
        prefixes: PrefixSurvey = GatewaySurvey(
            bus,
            gateways,
            name,
            "prefixes",
            partial(read_prefixes, cluster),
            (list[Block], GatewayPrefixes),
        )
        async with figures.running(), prefixes.running():
            yield cls(
                cluster,
                gateways,
                figures,
                ClusterPrefixes(cluster, prefixes),
                models,
                has_keys=has_keys,
            )

    async def snapshot(self, scope: Scope) -> dict[str, Any]:
        """Totals count from the gateways' starts: a reader makes rates of two snapshots, by
        gateway."""
        cluster = self._cluster
        now = time.monotonic()
        tenant = scope.tenant
        key = tenant.key if tenant is not None else None
        of_gateways = await self._figures.gather(key, key)
        merged = merge(of_gateways)
        rows = (
            replica_rows(cluster.router, merged.routed, merged.standings, now)
            if tenant is None
            else []
        )
        stages = stage_rows(self._gateways, cluster.stages.members) if tenant is None else []
        if tenant is None:
            models = self._model_rows(await self._cards(), merged.models)
        else:
            models = self._own_model_rows(merged.models)
        own = cluster.timelines.gateway_id
        findings = cluster_findings(
            missing=cluster.missing(),
            awaited=cluster.awaited(),
            models=models,
            outages=cluster.outages() if tenant is None else (),
            processes=[*(each for each in stages if each["id"] != own), *rows],
            replicas=rows,
            num_waiting=int(merged.totals["num_waiting"]) if tenant is None else 0,
        )
        seen: dict[str, Any] = {
            "at": round(time.time(), 3),
            "gateway": cluster.timelines.gateway_id,
            "grpc_port": self._grpc_port(),
            "gateways": [{"id": each.gateway_id, "totals": each.totals} for each in of_gateways],
            "caller": {
                "name": scope.caller,
                "is_admin": tenant is None,
                "has_keys": self._has_keys,
            },
            "ready": {
                "missing": cluster.missing(),
                "awaited": cluster.awaited(),
                "without": list(cluster.outages()),
            },
            "models": models,
            "adapters": adapter_rows(cluster, tenant),
            "tenants": tenant_rows(cluster.tenants, merged.tenants, tenant),
            "totals": merged.totals,
            "requests": merged.running,
            "recent": merged.recent,
            "findings": [dataclasses.asdict(each) for each in findings],
        }
        if scope.tenant is None:
            seen |= {"replicas": rows, "stages": stages, "prefixes": await self._prefixes.trees()}
            seen["event_lag"] = max(merged.event_lags.values())
            seen["event_lags"] = merged.event_lags
        return seen

    def _grpc_port(self) -> int | None:
        """Port of this gateway's public gRPC surface; None before its own heartbeat came back."""
        own = self._gateways.get(Kind.GATEWAY, self._cluster.timelines.gateway_id)
        port = own.address.rpartition(":")[2] if own is not None else ""
        return int(port) if port.isdecimal() else None

    async def _cards(self) -> list[dict[str, Any]]:
        """A supervisor that does not answer is left out: what gateways know of its models is shown
        all the same."""
        try:
            return await self._models.cards()
        except errors.Unavailable:
            return []

    def _model_rows(
        self, cards: Iterable[dict[str, Any]], demand: Mapping[str, Counts]
    ) -> list[dict[str, Any]]:
        """Rows of models that are served, or that a supervisor loads. `cards`: supervisors'
        descriptions of models; `demand`: requests by model, and those without a replica."""
        cluster = self._cluster
        known = {card["id"]: card for card in cards}
        served = cluster.stages.processors.models()
        replicas = Counter(
            each.member.model.name for each, _ in cluster.router.replicas() if each.member.model
        )
        rows = []
        for name in sorted({*served, *known}):
            entries = cluster.catalogues.entries(name)
            state = STATES.get(entries[0].state, "") if entries else "serving"
            num_requests, num_without = demand.get(name, (0, 0))
            row = {
                "id": name,
                "state": state,
                "replicas": replicas[name],
                "num_requests": num_requests,
                "num_without_replica": num_without,
                "max_model_len": served[name][0].max_model_len if name in served else None,
                "problem": next((entry.problem for entry in entries if entry.problem), ""),
                "is_supervised": name in known,
            }
            rows.append(row | known.get(name, {}))
        return rows

    def _own_model_rows(self, demand: Mapping[str, Counts]) -> list[dict[str, Any]]:
        """Rows of the models for a tenant: `demand` counts only its own requests, and of replicas
        it sees only whether there is one."""
        rows = self._model_rows([], demand)
        for row in rows:
            is_served = row["replicas"] > 0
            row |= {"num_without_replica": 0 if is_served else row["num_requests"]}
            row |= {"replicas": None if is_served else 0}
        return rows
