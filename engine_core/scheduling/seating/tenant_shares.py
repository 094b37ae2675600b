"""How seats and prompt tokens are shared among tenants: by weight while several want them, all to
one who is alone.

Knows who is here and how many seats each holds; knows nothing about steps or the order of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CLAIM_SECONDS = 10.0
"""Seconds for which a tenant counts as present after its last request, so that a tenant with pauses
between requests finds a free seat."""
KEPT = 1 / 16
"""Share of all seats that stays free for the next request while tenants are several: one that
yields takes a step or two."""
MIN_SEATS_TO_KEEP = 8
"""Least number of seats of an engine that keeps one of them free."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    num_requests: int = 0
    num_seats: int = 0
    left_at: float = 0.0
    """When its last request left."""


class TenantShares:
    """Shares of seats by tenant. It is notified of every request that enters, takes a seat, loses
    it or leaves."""

    def __init__(self, num_seats: int, num_blocks: int, clock: Callable[[], float]) -> None:
        self._num_seats = num_seats
        self._num_blocks = num_blocks
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._num_kept = max(1, int(num_seats * KEPT)) if num_seats >= MIN_SEATS_TO_KEEP else 0
        self._total_weight = 0.0
        self._absent: deque[tuple[float, str]] = deque()
        """Tenants without requests and the time at which the last one left, oldest first; entries
        of tenants that have returned are skipped."""

    def enter(self, name: str, weight: float) -> None:
        """Counts a request of the tenant; the last weight that was given holds."""
        tenant = self._tenants.setdefault(name, _Tenant(0.0))
        self._total_weight += weight - tenant.weight
        tenant.weight = weight
        tenant.num_requests += 1
        self._forget_absent()

    def leave(self, name: str) -> None:
        tenant = self._tenants[name]
        tenant.num_requests -= 1
        if not tenant.num_requests:
            tenant.left_at = self._clock()
            self._absent.append((tenant.left_at, name))

    def seat(self, name: str) -> None:
        self._tenants[name].num_seats += 1

    def unseat(self, name: str) -> None:
        self._tenants[name].num_seats -= 1

    def weights(self, most: int) -> dict[str, float]:
        """Weights of `most` of the tenants that have requests; the next call returns others."""
        found: dict[str, float] = {}
        for name, each in self._tenants.items():
            if each.num_requests:
                found[name] = each.weight
            if len(found) == most:
                break
        if len(found) < len(self._tenants):
            for name in found:
                self._tenants[name] = self._tenants.pop(name)
        return found

    @property
    def are_several(self) -> bool:
        """Whether several tenants are present."""
        return len(self._tenants) > 1

    def weight(self, name: str) -> float:
        return self._tenants[name].weight

    def level(self, name: str, more_seats: int = 0, num_blocks: int = 0) -> float:
        """How far ahead it would be: its part of all seats or of all blocks, whichever is larger,
        by weight.

        See Ghodsi et al., Dominant Resource Fairness (2011).
        """
        tenant = self._tenants[name]
        seats = (tenant.num_seats + more_seats) / self._num_seats
        blocks = num_blocks / self._num_blocks
        return max(seats, blocks) / tenant.weight

    def num_shares(self, name: str) -> int:
        """Number of seats that a tenant holds, as a multiple of its share of all seats (at least
        one seat). The tenant with the least goes first."""
        if not self.are_several:
            return 0
        tenant = self._tenants[name]
        share = self._num_seats * tenant.weight / self._total_weight
        return int(tenant.num_seats / max(1.0, share))

    def may_take(self, name: str, num_free: int) -> bool:
        """Whether a tenant may take one of the free seats. The last ones are kept from the tenant
        that would be farthest ahead, so that another one need not wait for an answer to end."""
        if not self.are_several or num_free > self._num_kept or not self.num_shares(name):
            return num_free > 0
        self._forget_absent()
        level = self.level(name, 1)
        is_ahead = all(self.level(other) < level for other in self._tenants if other != name)
        return num_free > (self._num_kept if is_ahead and self.are_several else 0)

    def _forget_absent(self) -> None:
        while self._absent and self._absent[0][0] + CLAIM_SECONDS <= self._clock():
            left_at, name = self._absent.popleft()
            tenant = self._tenants.get(name)
            if tenant is not None and not tenant.num_requests and tenant.left_at == left_at:
                self._total_weight -= tenant.weight
                del self._tenants[name]


def split(
    budget: int, demands: Mapping[str, int], weights: Callable[[str], float]
) -> dict[str, int]:
    """Divides `budget` among tenants that want a part of it, by weight; what one tenant does not
    need goes to the others."""
    parts: dict[str, int] = {}
    left = budget
    weight_left = sum(map(weights, demands))
    for name in sorted(demands, key=lambda name: demands[name] / weights(name)):
        weight = weights(name)
        # The last one's fraction is 1, but for rounding.
        fair = left if len(parts) == len(demands) - 1 else int(left * weight / weight_left)
        parts[name] = min(demands[name], fair)
        left -= parts[name]
        weight_left -= weight
    return parts
