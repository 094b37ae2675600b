"""Slots of adapters by tenant: while others wait for one, the tenant with the fewest takes the
next."""

from __future__ import annotations

from collections import Counter


class SlotShares:
    def __init__(self) -> None:
        self._used: dict[str, Counter[bytes]] = {}
        """Running requests by tenant and adapter."""
        self._num_used: Counter[str] = Counter()
        """Slots of the adapters that a tenant's running requests have."""
        self._waiting: dict[int, str] = {}
        """Tenants of requests that wait for a slot, by key."""

    def may_take(self, tenant: str) -> bool:
        """Whether a tenant may use one more adapter: no other one that waits has fewer slots."""
        others = (self._num_used[each] for each in self._waiting.values() if each != tenant)
        return self._num_used[tenant] <= min(others, default=self._num_used[tenant])

    def wait(self, key: int, tenant: str) -> None:
        """Notes that a request waits for a slot."""
        self._waiting[key] = tenant

    def end_wait(self, key: int) -> bool:
        """Notes that a request no longer waits. Returns whether it did."""
        return self._waiting.pop(key, None) is not None

    def take(self, tenant: str, digest: bytes, num_slots: int) -> None:
        """Notes that a request runs with an adapter of so many slots."""
        used = self._used.setdefault(tenant, Counter())
        used[digest] += 1
        if used[digest] == 1:
            self._num_used[tenant] += num_slots

    def leave(self, tenant: str, digest: bytes, num_slots: int) -> None:
        """Notes the end of such a request."""
        used = self._used[tenant]
        used[digest] -= 1
        if used[digest]:
            return
        del used[digest]
        self._num_used[tenant] -= num_slots
        if not used:
            del self._used[tenant]
            del self._num_used[tenant]
