"""Virtual times of tenants in one queue whose requests are not taken in the order of theirs.

Each request has a virtual time and a cost in it. A tenant's time is that behind its last request,
less the cost of those that still wait: what it was given, in whatever order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Tenant:
    end: float
    waiting_cost: float = 0.0
    num_waiting: int = 0


class TenantTurns:
    """Takes every request that enters or leaves the queue, with the same virtual time and cost both
    times. Keeps the tenants that have requests there."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, tenant: str, virtual_time: float, cost: float) -> None:
        end = virtual_time + cost
        each = self._tenants.setdefault(tenant, _Tenant(end))
        each.end = max(each.end, end)
        each.waiting_cost += cost
        each.num_waiting += 1

    def leave(self, tenant: str, cost: float) -> None:
        each = self._tenants[tenant]
        each.waiting_cost -= cost
        each.num_waiting -= 1
        if not each.num_waiting:
            del self._tenants[tenant]

    def virtual_time(self, tenant: str) -> float:
        """Smaller goes first."""
        each = self._tenants[tenant]
        return each.end - each.waiting_cost
