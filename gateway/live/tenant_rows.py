"""Rows of tenants: weight, limits, what they have running and waiting on this gateway, tokens since it started."""

from __future__ import annotations

from typing import Any

import msgspec

from ..request.cluster import Cluster
from ..request.metrics import TenantUse
from ..tenancy.directory import TenantDirectory
from ..tenancy.records import TenantRecord
from ..tenancy.tenants import Tenant

MAX_ROWS = 200
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")


def tenant_rows(cluster: Cluster, tenant: Tenant | None) -> list[dict[str, Any]]:
    """The row of a tenant; of None, of all that are kept or were seen, in the order of their names."""
    if tenant is not None:
        return [_row(cluster, tenant.id, tenant.key, _record(cluster, tenant))]
    tenants = cluster.tenants
    records = {each.key: each for each in tenants.records()} if isinstance(tenants, TenantDirectory) else {}
    rows = [_row(cluster, record.id, key, record) for key, record in records.items()]
    rows += [
        _row(cluster, use.name, key, None) for key, use in cluster.metrics.tenant_use.items() if key not in records
    ]
    return sorted(rows, key=lambda row: str(row["id"]))[:MAX_ROWS]


def _record(cluster: Cluster, tenant: Tenant) -> TenantRecord | None:
    tenants = cluster.tenants
    return tenants.record(tenant) if isinstance(tenants, TenantDirectory) else None


def _row(cluster: Cluster, name: str, key: str, record: TenantRecord | None) -> dict[str, Any]:
    num_running, num_waiting = cluster.admission.by_tenant().get(key, (0, 0))
    use = cluster.metrics.tenant_use.get(key, TenantUse(name))
    tokens = {name: getattr(use, name) for name in TOKENS}
    # The key tells tenants apart that have the same name: one of the key file, and one that was added.
    row = {
        "id": name,
        "key": key,
        "is_kept": record is not None,
        "num_running": num_running,
        "num_waiting": num_waiting,
        **tokens,
    }
    if record is None:
        return row | {"weight": 1.0, "tier": 0, "limits": {}, "models": {}, "num_keys": 0}
    limits = {"limits": msgspec.to_builtins(record.limits), "models": msgspec.to_builtins(record.models)}
    return row | {"weight": record.weight, "tier": record.tier, "num_keys": len(record.keys), **limits}
