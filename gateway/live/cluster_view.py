"""One moment of a cluster for people: plain data, within what a watcher may see.

Requests are those of all gateways; stages, engines and prefixes are what this gateway knows of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.proto.events_pb2 import CatalogueEntry
from headwater.services.runtime import errors
from headwater.services.runtime.membership import Members

from ..admin.models import ModelAdmin
from ..request.cluster import Cluster
from ..tenancy.tenants import Tenant
from .cluster_figures import ClusterFigures
from .findings import Finding, model_findings, queue_findings, replica_findings, service_findings
from .gateway_figures import Counts
from .merged_figures import merge
from .prefix_tree import prefix_tree
from .replica_rows import replica_rows, stage_rows
from .tenant_rows import tenant_rows

TREE_SECONDS = 2.0
STATES = {
    CatalogueEntry.STATE_LOADING: "loading",
    CatalogueEntry.STATE_SERVING: "serving",
    CatalogueEntry.STATE_UNLOADING: "unloading",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """A watcher, and the tenant that it sees; None: it sees all of them, and the processes."""

    caller: str
    tenant: Tenant | None


class ClusterView:
    def __init__(
        self, cluster: Cluster, gateways: Members, figures: ClusterFigures, models: ModelAdmin, *, has_keys: bool
    ) -> None:
        """`gateways`: the members of that kind, which a cluster does not follow for itself."""
        self._cluster, self._gateways, self._figures = cluster, gateways, figures
        self._models, self._has_keys = models, has_keys
        self._tree: tuple[float, list[dict[str, Any]]] = (0.0, [])

    async def snapshot(self, scope: Scope) -> dict[str, Any]:
        """Totals count from the gateways' starts: a reader makes rates of two snapshots, by gateway."""
        cluster, now, tenant = self._cluster, time.monotonic(), scope.tenant
        told = await self._figures.gather(tenant.key if tenant is not None else None)
        merged = merge(told)
        rows = replica_rows(cluster.router, merged.routed, now) if tenant is None else []
        if tenant is None:
            models = self._model_rows(await self._cards(), merged.models)
        else:
            models = self._own_model_rows(merged.models)
        num_waiting = int(merged.totals["num_waiting"])
        seen: dict[str, Any] = {
            "at": round(time.time(), 3),
            "gateway": cluster.timelines.gateway_id,
            "gateways": [{"id": each.gateway_id, "totals": each.totals} for each in told],
            "caller": {"name": scope.caller, "is_admin": tenant is None, "has_keys": self._has_keys},
            "ready": {"missing": cluster.missing(), "awaited": cluster.awaited(), "without": list(cluster.outages())},
            "models": models,
            "tenants": tenant_rows(cluster.tenants, merged.tenants, tenant),
            "totals": merged.totals,
            "requests": merged.running,
            "recent": merged.recent,
            "findings": [dataclasses.asdict(each) for each in self._findings(scope, rows, models, num_waiting)],
        }
        if scope.tenant is None:
            seen |= {
                "replicas": rows,
                "stages": stage_rows(self._gateways, cluster.members),
                "prefixes": self._prefixes(now),
            }
            seen["event_lag"] = cluster.router.event_lag
        return seen

    async def _cards(self) -> list[dict[str, Any]]:
        """A supervisor that does not answer is left out: what gateways know of its models is shown all the same."""
        try:
            return await self._models.cards()
        except errors.Unavailable:
            return []

    def _model_rows(self, cards: Iterable[dict[str, Any]], demand: Mapping[str, Counts]) -> list[dict[str, Any]]:
        """Models that are served, or that a supervisor loads. `cards` are what supervisors say of theirs, `demand` the
        requests by model and those of them without a replica."""
        cluster, known = self._cluster, {card["id"]: card for card in cards}
        served = cluster.processors.models()
        replicas = Counter(each.member.model.name for each, _ in cluster.router.replicas() if each.member.model)
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
        """What a tenant is told of the models: `demand` is of its own requests, and of engines it learns whether there
        is any."""
        rows = self._model_rows([], demand)
        for row in rows:
            is_served = row["replicas"] > 0
            row |= {"num_without_replica": 0 if is_served else row["num_requests"]}
            row |= {"replicas": None if is_served else 0}
        return rows

    def _prefixes(self, now: float) -> list[dict[str, Any]]:
        """By model; made anew every so many seconds for all watchers."""
        made_at, trees = self._tree
        if now - made_at < TREE_SECONDS:
            return trees
        router, chains = self._cluster.router, list(self._cluster.router.recent_chains)
        trees = []
        for model, _ in sorted(self._cluster.processors.models().values(), key=lambda each: each[0].name):
            own = [chain for key, chain in chains if key == model.key]
            nodes = prefix_tree(own, partial(router.holders, model.key))
            trees.append(
                {"model": model.name, "block_size": model.block_size, "num_requests": len(own), "nodes": nodes}
            )
        self._tree = now, trees
        return trees

    def _findings(
        self, scope: Scope, replicas: list[dict[str, Any]], models: list[dict[str, Any]], num_waiting: int
    ) -> Iterable[Finding]:
        cluster = self._cluster
        outages = cluster.outages() if scope.tenant is None else ()
        yield from service_findings(cluster.missing(), cluster.awaited(), outages)
        yield from model_findings(models)
        if scope.tenant is None:
            yield from replica_findings(replicas)
            yield from queue_findings(num_waiting)
