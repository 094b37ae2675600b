"""The order in which the waiting work of tenants gets the places of a stage: start-time fair
queueing (Goyal, Vin and Cheng, 1996) over measured seconds.

Knows neither threads nor what the work is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .errors import LimitExceeded

MAX_SHARED_PLACES = 2
"""Places of a tenant while another one waits."""
MAX_AWAY = 4096
"""Number of idle tenants whose virtual times are kept. Beyond it, times that no longer matter are
dropped."""
LEARNING = 0.3
EntryT = TypeVar("EntryT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of what waits."""

    num_waiting: int = 1024
    """Entries of a tenant."""
    num_bytes: int = 64 << 20
    """Bytes of a tenant's entries together; one entry alone may have more."""
    wait_seconds: float = 10.0
    """Seconds that an entry waits for its turn."""


@dataclass(slots=True, eq=False)
class _Tenant(Generic[EntryT]):
    """A tenant with entries that wait or work."""

    time: float
    """Virtual time of the tenant: seconds of work that it was given."""
    waiting: OrderedDict[EntryT, int] = field(default_factory=OrderedDict)
    """Number of bytes by entry, in the order of arrival."""
    num_bytes: int = 0
    num_working: int = 0
    usual_seconds: float = 0.0
    """Seconds that its work took lately."""


class FairQueue(Generic[EntryT]):
    """Gives `num_places` places to the entries of tenants. The tenant that has been given the
    fewest seconds comes first.

    The last free place is for a tenant that has none: however long the work of one tenant takes,
    another tenant does not wait for its end.
    """

    def __init__(self, name: str, num_places: int, limits: QueueLimits) -> None:
        """`name`, in errors, is what the entries wait for."""
        self._name = name
        self._limits = limits
        self._num_free = num_places
        self._active: dict[str, _Tenant[EntryT]] = {}
        self._away: dict[str, float] = {}
        """Virtual times of tenants without work that are later than `_reached`."""
        self._reached = 0.0
        """Latest virtual time at which work began. A tenant that comes back begins there."""

    def add(self, key: str, entry: EntryT, num_bytes: int) -> None:
        """Lets an entry of the tenant wait. Raises `LimitExceeded` when too much of the tenant
        waits already."""
        tenant = self._active.get(key)
        if tenant is None:
            time = max(self._reached, self._away.pop(key, 0.0))
            tenant = self._active[key] = _Tenant(time)
        self._check_room(tenant, num_bytes)
        tenant.waiting[entry] = num_bytes
        tenant.num_bytes += num_bytes

    def remove(self, key: str, entry: EntryT) -> bool:
        """Takes an entry out of the queue. False: it has its place already."""
        tenant = self._active[key]
        num_bytes = tenant.waiting.pop(entry, None)
        if num_bytes is None:
            return False
        tenant.num_bytes -= num_bytes
        self._forget_if_idle(key, tenant)
        return True

    def next(self) -> EntryT | None:
        """Gives a place to the next entry. None: no entry may have a place now."""
        if not self._num_free:
            return None
        waiting = [tenant for tenant in self._active.values() if tenant.waiting]
        allowed = [tenant for tenant in waiting if self._may_begin(tenant, len(waiting))]
        if not allowed:
            return None
        tenant = min(allowed, key=lambda each: (each.time, each.num_working))
        entry, num_bytes = tenant.waiting.popitem(last=False)
        tenant.num_bytes -= num_bytes
        tenant.num_working += 1
        self._num_free -= 1
        self._reached = max(self._reached, tenant.time)
        return entry

    def end(self, key: str, seconds: float) -> None:
        """Frees the place of an entry and charges its tenant for the seconds that it took."""
        tenant = self._active[key]
        tenant.num_working -= 1
        self._num_free += 1
        tenant.time += seconds
        tenant.usual_seconds += LEARNING * (seconds - tenant.usual_seconds)
        self._forget_if_idle(key, tenant)

    def _may_begin(self, tenant: _Tenant[EntryT], num_waiting_tenants: int) -> bool:
        if not tenant.num_working:
            return True
        if self._num_free == 1:
            return False
        return num_waiting_tenants == 1 or tenant.num_working < MAX_SHARED_PLACES

    def _check_room(self, tenant: _Tenant[EntryT], num_bytes: int) -> None:
        limits = self._limits
        count = len(tenant.waiting)
        if count >= limits.num_waiting:
            reason = (
                f"{count} requests of the tenant wait for {self._name}; allowed: at most "
                f"{limits.num_waiting}"
            )
        elif count and tenant.num_bytes + num_bytes > limits.num_bytes:
            reason = (
                f"{tenant.num_bytes} bytes of the tenant wait for {self._name}, and this request "
                f"has {num_bytes}; allowed: at most {limits.num_bytes} together"
            )
        else:
            return
        # In that time half of them have been served, if one place serves them.
        seconds = count * tenant.usual_seconds / 2
        raise LimitExceeded(reason, retry_after=min(max(1.0, seconds), limits.wait_seconds))

    def _forget_if_idle(self, key: str, tenant: _Tenant[EntryT]) -> None:
        if tenant.waiting or tenant.num_working:
            return
        del self._active[key]
        if not self._active:
            self._away.clear()
            self._reached = 0.0
        elif tenant.time > self._reached:
            self._away[key] = tenant.time
        if len(self._away) > MAX_AWAY:
            self._away = {name: time for name, time in self._away.items() if time > self._reached}
