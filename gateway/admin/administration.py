"""The rights to change a running cluster, and the record of what was changed.

With administrators' keys one is needed, and each change leaves a record. Without any keys, which
means on loopback, every client on this machine may, but no web page other than the gateway's own
console.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from headwater.services.runtime import errors

from ..http.http_exchange import Exchange
from .tenants import TenantAdmin


class Administration:
    def __init__(self, admin: TenantAdmin | None, *, is_open: bool) -> None:
        self._admin = admin
        self._is_open = is_open

    def caller(self, exchange: Exchange) -> str:
        """The administrator's name; empty where there are none and everyone may. Raises
        `PermissionDenied`."""
        if self._admin is not None:
            return self._admin.admin_of(exchange)
        if not self._is_open:
            raise errors.PermissionDenied(
                "this needs an administrator's key: set one at the gateway"
            )
        if _is_from_another_page(exchange):
            raise errors.PermissionDenied("without keys a web page may not change a deployment")
        return ""

    def may_see(self, exchange: Exchange) -> bool:
        """Whether the caller may know of all tenants."""
        if self._admin is not None:
            return self._admin.is_admin(exchange)
        return self._is_open and not _is_from_another_page(exchange)

    @contextlib.asynccontextmanager
    async def recorded(
        self, admin: str, action: str, change: dict[str, Any]
    ) -> AsyncIterator[None]:
        if self._admin is None:
            yield
            return
        async with self._admin.recorded(admin, action, "", change):
            yield


def _is_from_another_page(exchange: Exchange) -> bool:
    """Whether a web page asks that is not the gateway's own. Browsers set `sec-fetch-site`; a page
    that rebinds its name to this machine was refused by its `host` before."""
    is_own = exchange.headers.get("sec-fetch-site") == "same-origin"
    return "origin" in exchange.headers and not is_own
