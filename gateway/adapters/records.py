"""Stored record of an adapter: a name, its content, and the tenants that may use it."""

from __future__ import annotations

import time

import msgspec

from ..tenancy.tenants import Tenant

OPERATOR = ""
"""Owner of adapters that belong to no tenant."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value under an owner and a name in the bucket."""

    name: str
    base: str
    """The served model that it belongs to."""
    digest: bytes
    """Hash of its content."""
    rank: int
    """The highest of its projections."""
    folder: str = ""
    """Folder of its files on the engines' hosts; empty: the adapter store has them."""
    content: str = ""
    """Name of its files in the adapter store."""
    num_bytes: int = 0
    """Bytes of its files in the adapter store."""
    owner: str = OPERATOR
    """`Tenant.key` of the tenant that brought it."""
    tenants: tuple[str, ...] | None = None
    """Names of the tenants that may use an operator's adapter; None: all."""
    created_at: float = msgspec.field(default_factory=time.time)

    @property
    def is_public(self) -> bool:
        """Whether all tenants may use it."""
        return not self.owner and self.tenants is None

    def may_use(self, tenant: Tenant) -> bool:
        if self.owner:
            return self.owner == tenant.key
        return self.tenants is None or tenant.id in self.tenants
