"""`headwater tenant …`: the calls of /admin that it makes, and their answers as tables for
people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
from rich.table import Table

from ..runtime.printable import shown
from .admin_client import call
from .plain_table import plain_table

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "budget", "budget_period")
BYTES = ("file_bytes", "response_bytes", "adapters", "adapter_bytes")


class TenantClient:
    """One gateway's /admin/tenants."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def add(self, tenant: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "", {"id": tenant, **settings})

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", "")["data"]
        return found

    def show(self, tenant: str) -> dict[str, Any]:
        return self._call("GET", _path(tenant))

    def set(self, tenant: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("PATCH", _path(tenant), dict(settings))

    def rotate_key(self, tenant: str, grace_seconds: int) -> dict[str, Any]:
        return self._call("POST", _path(tenant) + "/keys", {"expire_others_after": grace_seconds})

    def remove(self, tenant: str) -> dict[str, Any]:
        return self._call("DELETE", _path(tenant))

    def usage(self, tenant: str, days: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", f"{_path(tenant)}/usage?days={days}")[
            "data"
        ]
        return found

    def served_models(self) -> list[str]:
        """Ids of the models that the gateway serves now; empty where it does not say."""
        reply = self._client.get("/v1/models")
        return [] if reply.is_error else [str(each["id"]) for each in reply.json()["data"]]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return call(self._client, method, f"/tenants{path}", body)


def _path(tenant: str) -> str:
    return f"/{quote(tenant, safe='')}"


def tenants_table(tenants: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "tenant", "weight", "tier", "cache", "limits", "keys", numbers=("weight", "tier", "keys")
    )
    for each in tenants:
        shared = "shared" if each["shared_cache"] else "own"
        keys = str(len(each["keys"]))
        table.add_row(
            shown(each["id"]),
            f"{each['weight']:g}",
            str(each["tier"]),
            shared,
            _all_limits(each),
            keys,
        )
    return table


def tenant_table(tenant: Mapping[str, Any]) -> Table:
    """Table of what is set of one tenant, a line a setting."""
    table = plain_table("tenant", shown(tenant["id"]))
    table.add_row("weight", f"{tenant['weight']:g}")
    table.add_row("tier", str(tenant["tier"]))
    table.add_row("cache", "shared" if tenant["shared_cache"] else "own")
    escaped = tenant["escape_special_tokens"]
    table.add_row("special tokens", "text" if escaped else "as the model's processors are set")
    table.add_row("limits", _all_limits(tenant))
    for name in BYTES:
        size = tenant[name]
        table.add_row(
            name.replace("_", " "), "the default of all tenants" if size is None else f"{size:,}"
        )
    table.add_row("keys", "\n".join(_key(each) for each in tenant["keys"]) or "none")
    return table


def usage_table(rows: list[dict[str, Any]]) -> Table:
    columns = {
        "requests": "requests",
        "prompt": "prompt_tokens",
        "cached": "cached_tokens",
        "output": "output_tokens",
    }
    table = plain_table("day", "model", *columns, numbers=tuple(columns))
    for row in rows:
        table.add_row(
            row["day"], shown(row["model"]), *(f"{row[name]:,}" for name in columns.values())
        )
    return table


def _key(key: Mapping[str, Any]) -> str:
    ends = key["expires_at"]
    until = "" if ends is None else f", ends {datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M} UTC"
    limits = f", {_limits(key['limits'])}" if key["limits"] else ""
    return f"{shown(key['id'])}{limits}{until}"


def _all_limits(tenant: Mapping[str, Any]) -> str:
    """Rows of limits: the tenant's own limits, then one row for each model with limits."""
    models = [
        f"{shown(model)}: {_limits(limits)}" for model, limits in sorted(tenant["models"].items())
    ]
    return "\n".join([_limits(tenant["limits"]), *models])


def _limits(limits: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name.replace('_', ' ')} {limits[name]}" for name in LIMITS if name in limits)
        or "none"
    )
