"""Rows of tenants: weight, limits, what they have running and waiting, tokens since the gateways
started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..tenancy.directory import TenantDirectory
from ..tenancy.records import TenantRecord
from ..tenancy.tenants import Tenant, Tenants
from .gateway_figures import TenantFigures

MAX_ROWS = 200


def tenant_rows(
    tenants: Tenants, figures: Mapping[str, TenantFigures], tenant: Tenant | None
) -> list[dict[str, Any]]:
    """The row of a tenant; of None, of all that are kept or were seen, in the order of their names.
    `figures` are by the tenant's key."""
    if tenant is not None:
        record = tenants.record(tenant) if isinstance(tenants, TenantDirectory) else None
        return [_row(tenant.id, tenant.key, figures.get(tenant.key), record)]
    records = (
        {each.key: each for each in tenants.records()}
        if isinstance(tenants, TenantDirectory)
        else {}
    )
    rows = [_row(record.id, key, figures.get(key), record) for key, record in records.items()]
    rows += [_row(each.id, key, each, None) for key, each in figures.items() if key not in records]
    return sorted(rows, key=lambda row: str(row["id"]))[:MAX_ROWS]


def _row(
    name: str, key: str, figures: TenantFigures | None, record: TenantRecord | None
) -> dict[str, Any]:
    # The key separates tenants of the same name: one of the key file, and one that an administrator
    # added.
    row: dict[str, Any] = msgspec.to_builtins(figures or TenantFigures(name)) | {
        "id": name,
        "key": key,
        "is_kept": record is not None,
    }
    if record is None:
        return row | {"weight": 1.0, "tier": 0, "limits": {}, "models": {}, "num_keys": 0}
    limits = {
        "limits": msgspec.to_builtins(record.limits),
        "models": msgspec.to_builtins(record.models),
    }
    return row | {
        "weight": record.weight,
        "tier": record.tier,
        "num_keys": len(record.keys),
        **limits,
    }
