"""One moment of a cluster as one gateway sees it, for people: plain data, within what a watcher may see."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.proto.events_pb2 import CatalogueEntry
from headwater.services.runtime import errors
from headwater.services.runtime.membership import Members

from ..admin.models import ModelAdmin
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..tenancy.tenants import Tenant
from .findings import Finding, model_findings, queue_findings, replica_findings, service_findings
from .prefix_tree import prefix_tree
from .replica_rows import replica_rows, stage_rows
from .request_rows import recent_rows, running_rows
from .tenant_rows import tenant_rows

NUM_LOOKED_THROUGH = 400
"""Ended requests among which a tenant's own are looked for."""
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
    def __init__(self, cluster: Cluster, gateways: Members, models: ModelAdmin, *, has_keys: bool) -> None:
        """`gateways`: the members of that kind, which a cluster does not follow for itself."""
        self._cluster, self._gateways, self._models, self._has_keys = cluster, gateways, models, has_keys
        self._tree: tuple[float, list[dict[str, Any]]] = (0.0, [])

    async def snapshot(self, scope: Scope) -> dict[str, Any]:
        """Totals count from the gateway's start: a reader makes rates of two snapshots."""
        cluster, now = self._cluster, time.monotonic()
        rows = replica_rows(cluster.router, now) if scope.tenant is None else []
        models = self._model_rows(await self._cards()) if scope.tenant is None else self._own_model_rows(scope.tenant)
        tenants = tenant_rows(cluster, scope.tenant)
        seen: dict[str, Any] = {
            "at": round(time.time(), 3),
            "gateway": cluster.timelines.gateway_id,
            "caller": {"name": scope.caller, "is_admin": scope.tenant is None, "has_keys": self._has_keys},
            "ready": {"missing": cluster.missing(), "awaited": cluster.awaited(), "without": list(cluster.outages())},
            "models": models,
            "tenants": tenants,
            "totals": self._totals(scope.tenant, tenants),
            "requests": running_rows(cluster.running_prompts(), scope.tenant),
            "recent": recent_rows(cluster.timelines.youngest(NUM_LOOKED_THROUGH), scope.tenant),
            "findings": [dataclasses.asdict(each) for each in self._findings(scope, rows, models)],
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

    def _totals(self, tenant: Tenant | None, tenants: list[dict[str, Any]]) -> dict[str, Any]:
        """Of a tenant from its row. Answers that run count with the tokens that they have so far."""
        cluster, metrics = self._cluster, self._cluster.metrics
        output = sum(each.num_output_tokens for each in self._prompts_of(tenant))
        if tenant is not None:
            (row,) = tenants
            names = ("num_running", "num_waiting", "prompt_tokens", "cached_tokens")
            return {name: row[name] for name in names} | {"output_tokens": row["output_tokens"] + output}
        return {
            "num_running": cluster.admission.num_running,
            "num_waiting": cluster.admission.num_queued,
            "prompt_tokens": metrics.prompt_tokens.value(),
            "cached_tokens": metrics.cached_tokens.value(),
            "output_tokens": metrics.generation_tokens.value() + output,
            "num_finished": metrics.finished.value(),
            "num_refused": metrics.refused.value(),
            "num_migrated": metrics.migrations.value(),
        }

    def _model_rows(self, cards: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Models that are served, or that a supervisor loads. `cards` are what supervisors say of theirs."""
        cluster, known = self._cluster, {card["id"]: card for card in cards}
        served = cluster.processors.models()
        replicas = Counter(each.member.model.name for each, _ in cluster.router.replicas() if each.member.model)
        demand = cluster.metrics.demand.read()
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

    def _own_model_rows(self, tenant: Tenant) -> list[dict[str, Any]]:
        """What a tenant is told of the models: counts are of its own requests, and of engines it learns whether there
        is any."""
        own = Counter(each.request.model for each in self._prompts_of(tenant))
        rows = self._model_rows([])
        for row in rows:
            count = own[row["id"]]
            is_served = row["replicas"] > 0
            row |= {"num_requests": count, "num_without_replica": 0 if is_served else count}
            row |= {"replicas": None if is_served else 0}
        return rows

    def _prompts_of(self, tenant: Tenant | None) -> list[Generation]:
        """Prompts of a tenant, by whichever of its keys, that wait or run; of None, all."""
        prompts = self._cluster.running_prompts()
        return [each for each in prompts if tenant is None or each.request.caller.tenant.key == tenant.key]

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
        self, scope: Scope, replicas: list[dict[str, Any]], models: list[dict[str, Any]]
    ) -> Iterable[Finding]:
        cluster = self._cluster
        outages = cluster.outages() if scope.tenant is None else ()
        yield from service_findings(cluster.missing(), cluster.awaited(), outages)
        yield from model_findings(models)
        if scope.tenant is None:
            yield from replica_findings(replicas)
            yield from queue_findings(cluster.admission.num_queued)
