"""GET /console/live: a stream of snapshots for people who watch, over server-sent events, one a
second.

The key travels in a header, as everywhere. Without an administrator's key a watcher sees its own
tenant alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from headwater.services.runtime import errors

from ..admin.administration import Administration
from ..http.http_exchange import Exchange
from ..request.cluster import Cluster
from ..tenancy.caller import Caller
from ..wire.body_stream import BodyStream
from .cluster_view import ClusterView, Scope

TICK_SECONDS = 1.0
MAX_WATCHERS = 32
MAX_OF_TENANT = 4
"""Most watchers of one gateway with an administrator's key, and as many with keys of tenants; most
of one tenant. A watcher costs about a millisecond a second."""
EVERYONE = "administrator"


class LiveFeed:
    def __init__(
        self, cluster: Cluster, administration: Administration, view: ClusterView, patience: float
    ) -> None:
        """`patience`: seconds that a watcher may read nothing."""
        self._cluster = cluster
        self._administration = administration
        self._view = view
        self._patience = patience
        self._watchers: Counter[str | None] = Counter()
        """Number of watchers by key of their tenant. The key None counts watchers who may see all
        tenants."""

    async def watch(self, exchange: Exchange) -> None:
        """Raises `LimitExceeded` for one watcher too many."""
        scope = self._scope(exchange)
        key = scope.tenant.key if scope.tenant is not None else None
        self._check_room(key)
        if exchange.query.get("once") == "1":
            exchange.end_head()
        self._watchers[key] += 1
        try:
            if exchange.query.get("once") == "1":
                await exchange.reply_json(await self._view.snapshot(scope))
            else:
                await self._stream(exchange, scope)
        finally:
            self._watchers[key] -= 1
            # Without the names of tenants that watch no longer.
            self._watchers = +self._watchers

    def _check_room(self, key: str | None) -> None:
        """Raises `LimitExceeded`. Watchers of tenants do not use places of administrators, and one
        tenant does not use all places of tenants."""
        num_administrators = self._watchers[None]
        counts = [(num_administrators, MAX_WATCHERS)]
        if key is not None:
            num_tenants = self._watchers.total() - num_administrators
            counts = [(num_tenants, MAX_WATCHERS), (self._watchers[key], MAX_OF_TENANT)]
        for num, most in counts:
            if num >= most:
                raise errors.LimitExceeded(
                    f"{num} watchers are here; allowed: {most}", retry_after=5.0
                )

    async def _stream(self, exchange: Exchange, scope: Scope) -> None:
        stream = exchange.open_stream(lambda: None)
        work = self._send(stream, scope)
        await exchange.unless_client_leaves(work)
        await exchange.end_stream(b"")

    async def _send(self, stream: BodyStream, scope: Scope) -> None:
        """Sends snapshots until the gateway drains. Raises `KeyRevoked` when the watcher's key is
        gone, `SlowReader` when the watcher reads nothing."""
        blocked_for = 0.0
        while not self._cluster.draining:
            if scope.tenant is not None:
                self._cluster.tenants.check(scope.tenant)
            if not stream.blocked:
                blocked_for = 0.0
                stream.write(
                    b"data: " + msgspec.json.encode(await self._view.snapshot(scope)) + b"\n\n"
                )
            elif (blocked_for := blocked_for + TICK_SECONDS) > self._patience:
                raise errors.SlowReader(self._patience)
            await asyncio.sleep(TICK_SECONDS)

    def _scope(self, exchange: Exchange) -> Scope:
        """Raises `Unauthenticated`."""
        if self._administration.may_see(exchange):
            return Scope(EVERYONE, None)
        tenant = Caller.of(exchange.headers, self._cluster.tenants).tenant
        return Scope(tenant.id, tenant)
