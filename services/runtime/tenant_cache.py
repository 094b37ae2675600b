"""A cache whose entries clients choose: bounded in bytes, and each tenant drives out its own
entries first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(slots=True, eq=False)
class _Tenant(Generic[KeyT]):
    num_bytes: int = 0
    sizes: OrderedDict[KeyT, int] = field(default_factory=OrderedDict)
    """Bytes by key, the one that was used last at the end."""


class TenantCache(Generic[KeyT, ValueT]):
    """Holds `max_bytes` at most. For a new entry the least recently used one goes of the tenant
    that has the most bytes."""

    def __init__(
        self,
        max_bytes: int,
        *,
        goes_first: Callable[[ValueT], bool] = lambda value: False,
        on_drop: Callable[[ValueT], None] = lambda value: None,
    ) -> None:
        """`goes_first`: whether an entry goes before those that were used less recently. `on_drop`
        is called with each entry that is removed, for whatever reason."""
        self._max_bytes = max_bytes
        self._goes_first = goes_first
        self._on_drop = on_drop
        self._num_bytes = 0
        self._entries: dict[KeyT, tuple[str, ValueT]] = {}
        self._tenants: dict[str, _Tenant[KeyT]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __getitem__(self, key: KeyT) -> ValueT:
        """Raises `KeyError`. The entry counts as used."""
        tenant, value = self._entries[key]
        self._tenants[tenant].sizes.move_to_end(key)
        return value

    def get(self, key: KeyT) -> ValueT | None:
        """The entry, which counts as used; None: there is none."""
        return self[key] if key in self._entries else None

    def put(self, tenant: str, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Adds or replaces an entry. One that is larger than all room is not kept."""
        self.drop(key)
        self._entries[key] = tenant, value
        self._tenants.setdefault(tenant, _Tenant()).sizes[key] = 0
        self.resize(key, num_bytes)

    def resize(self, key: KeyT, num_bytes: int) -> None:
        """Notes that an entry has `num_bytes` bytes now; ignored where it was evicted."""
        if key not in self._entries:
            return
        owner = self._tenants[self._entries[key][0]]
        growth = num_bytes - owner.sizes[key]
        owner.sizes[key] = num_bytes
        owner.num_bytes += growth
        self._num_bytes += growth
        while self._num_bytes > self._max_bytes:
            self.drop_one()

    def drop_one(self) -> None:
        """Removes the least recently used entry of the tenant that has the most bytes."""
        keys = max(self._tenants.values(), key=lambda tenant: tenant.num_bytes).sizes
        first = next((key for key in keys if self._goes_first(self._entries[key][1])), None)
        self.drop(next(iter(keys)) if first is None else first)

    def drop(self, key: KeyT) -> None:
        """Removes an entry, if it is there."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        name, value = entry
        owner = self._tenants[name]
        num_bytes = owner.sizes.pop(key)
        owner.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not owner.sizes:
            del self._tenants[name]
        self._on_drop(value)
