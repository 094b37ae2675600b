"""The caller of an HTTP request: its identity, its rights, and its place in its tenant's minute."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headwater.services.runtime.errors import HeadwaterError

from ..request.cluster import Cluster, shutting_down
from ..tenancy.caller import Caller
from ..wire.http_errors import status_of
from .http_exchange import Exchange


class Callers:
    """Callers of one gateway."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def identify(self, exchange: Exchange) -> Caller:
        """Identifies the caller. Raises `Unauthenticated` and other errors of the headers."""
        if exchange.tenants is not None:
            # The request of a tenant that is gone is not computed.
            self._cluster.tenants.check(exchange.tenants.tenant)
        caller = Caller.of(exchange.headers, exchange.tenants or self._cluster.tenants)
        caller = msgspec.structs.replace(caller, standing=exchange.standing)
        exchange.tenant = caller.tenant.key
        if exchange.known is None:
            return caller
        return msgspec.structs.replace(caller, request_id=exchange.known.id)

    def admit(self, exchange: Exchange) -> Caller:
        """The caller of work. Raises `Unavailable` while draining."""
        if self._cluster.draining:
            raise shutting_down()
        route = _route(exchange)
        caller = self._cluster.spans.begun(self.identify(exchange), f"{exchange.method} {route}")
        if caller.span.is_collected:
            caller.span.describe(
                {
                    "http.request.method": exchange.method,
                    "http.route": route,
                    "url.path": exchange.path,
                }
            )
            caller = msgspec.structs.replace(caller, outcome=_outcome)
        exchange.request_id = caller.shown_id
        if not caller.standing.is_counted:
            self._cluster.accounts.exhausted.reject_early(caller.tenant, caller.standing)
        return caller

    def let_in(self, exchange: Exchange) -> Caller:
        """The caller of an answer. Raises what the request would be refused with after its body was
        read."""
        caller = self.admit(exchange)
        self._cluster.reject_early(caller)
        return caller

    async def counted(self, exchange: Exchange) -> Caller:
        """The caller of something that no engine computes. Raises `LimitExceeded` where the minute
        is used up."""
        caller = self.identify(exchange)
        await self.count(caller)
        return caller

    async def count(self, caller: Caller, model: str = "") -> None:
        """Takes the request's place in its tenant's minute. Raises `LimitExceeded`."""
        await self._cluster.accounts.count(caller.tenant, caller.standing, model)


def _route(exchange: Exchange) -> str:
    """The path without ids of its own: a span's name is one of few."""
    route = f"{exchange.path}/"
    for name, value in exchange.path_params.items():
        before, found, after = route.rpartition(f"/{value}/")
        route = f"{before}/{{{name}}}/{after}" if found else route
    return route[:-1]


def _outcome(fault: HeadwaterError | None) -> Mapping[str, int]:
    return {"http.response.status_code": 200 if fault is None else status_of(fault)}
