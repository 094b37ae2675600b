"""Tenants of the deployment under test, by its administrators' API."""

from __future__ import annotations

import httpx

ADMIN_SECONDS = 60.0
"""Seconds that an administrator's call may take."""


class Tenants:
    """Tenants of a deployment under test, made and changed over `/admin`. Methods raise
    `httpx.HTTPError`, as where a body still holds up the gateway."""

    def __init__(self, rest: str, admin_key: str) -> None:
        headers = {"authorization": f"Bearer {admin_key}"}
        self._client = httpx.AsyncClient(base_url=rest, headers=headers, timeout=ADMIN_SECONDS)

    async def add(self, name: str, **limits: int) -> str:
        """Key of a new tenant."""
        reply = await self._client.post("/admin/tenants", json={"id": name, "limits": limits})
        reply.raise_for_status()
        key: str = reply.json()["key"]
        return key

    async def remove(self, name: str) -> None:
        """Removes a tenant with all of its running requests."""
        (await self._client.delete(f"/admin/tenants/{name}")).raise_for_status()

    async def __aenter__(self) -> Tenants:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
