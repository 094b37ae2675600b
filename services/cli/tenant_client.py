"""`headwater tenant …`: the calls of /admin that it makes, and their answers as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
from rich.table import Table

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "budget", "budget_period")


class TenantError(Exception):
    """What the gateway answered instead, in a sentence."""


class TenantClient:
    """One gateway's /admin."""

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
        found: list[dict[str, Any]] = self._call("GET", f"{_path(tenant)}/usage?days={days}")["data"]
        return found

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = self._client.request(method, f"/admin/tenants{path}", json=body)
        answer: dict[str, Any] = reply.json()
        if reply.is_error:
            raise TenantError(answer.get("error", {}).get("message", f"the gateway answered {reply.status_code}"))
        return answer


def _path(tenant: str) -> str:
    return f"/{quote(tenant, safe='')}"


def tenants_table(tenants: list[dict[str, Any]]) -> Table:
    table = Table("tenant", "weight", "tier", "cache", "limits", "keys")
    for each in tenants:
        shared = "shared" if each["shared_cache"] else "own"
        keys = str(len(each["keys"]))
        table.add_row(each["id"], f"{each['weight']:g}", str(each["tier"]), shared, _limits(each["limits"]), keys)
    return table


def usage_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    table = Table("day", "model", *columns)
    for row in rows:
        table.add_row(row["day"], row["model"], *(f"{row[name]:,}" for name in columns))
    return table


def _limits(limits: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {limits[name]}" for name in LIMITS if name in limits) or "none"
