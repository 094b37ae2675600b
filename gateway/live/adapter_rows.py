"""Rows of a cluster's adapters: of all tenants, or those that one tenant may use."""

from __future__ import annotations

from typing import Any

from headwater.services.runtime.member import Kind

from ..adapters.placement import has
from ..request.cluster import Cluster
from ..tenancy.tenants import Tenant

MAX_ROWS = 200


def adapter_rows(cluster: Cluster, tenant: Tenant | None) -> list[dict[str, Any]]:
    """Rows of adapters, at most `MAX_ROWS`. A tenant learns neither who else may use an adapter nor
    how many engines have it."""
    if tenant is not None:
        seen = cluster.adapters.seen_by(tenant)
        return [{"id": name, "base": seen[name].base} for name in sorted(seen)[:MAX_ROWS]]
    engines = cluster.stages.members.of(Kind.ENGINE)
    return [
        {
            "id": record.name,
            "base": record.base,
            "rank": record.rank,
            "owner": record.owner or None,
            "tenants": record.tenants,
            "replicas": sum(has(each, record.digest) for each in engines),
            "on_device": sum(
                each.load is not None and record.digest in each.load.resident_adapters
                for each in engines
            ),
        }
        for record in cluster.adapters.all()[:MAX_ROWS]
    ]
