"""The REST handler of /demand/{name}: how many requests a model has, for an autoscaler of its
engines."""

from __future__ import annotations

from headwater.services.runtime import errors

from ..http.http_exchange import Exchange
from ..stages.cluster_demand import ClusterDemand


class DemandPage:
    """Open to every client, as the same numbers in /metrics are: an autoscaler needs no key."""

    def __init__(self, demand: ClusterDemand) -> None:
        self._demand = demand

    async def get(self, exchange: Exchange) -> None:
        """Raises `NotFound` for a model that no gateway knows: zero would end its engines."""
        name = exchange.path_params["name"]
        if (counts := self._demand.of(name)) is None:
            raise errors.NotFound("model", name)
        requests, without_replica = counts
        await exchange.reply_json(
            {"model": name, "requests": requests, "requests_without_replica": without_replica}
        )
