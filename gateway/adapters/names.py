"""Meaning of a client's name: an adapter of the catalogue, one that engines were started with,
or neither."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members

from ..tenancy.tenants import Tenant
from .catalogue import AdapterCatalogue
from .records import OPERATOR, AdapterRecord
from .served_adapters import published

NO_ADAPTER = b""


class Target(msgspec.Struct, frozen=True, gc=False):
    """Model that answers a request, and the adapter with which it does."""

    model: str
    adapter: bytes = NO_ADAPTER
    """Hash of the adapter's content; empty: none."""
    is_public: bool = True
    """Whether all tenants may know the adapter's name."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter as clients see it."""

    base: str
    digest: bytes
    created_at: float


class AdapterNames:
    """Names of adapters by tenant. A name of the catalogue comes before one of the engines' own."""

    def __init__(self, members: Members, catalogue: AdapterCatalogue) -> None:
        self._members = members
        self.catalogue = catalogue

    def target(self, tenant: Tenant, name: str) -> Target:
        """Target of a name that is not a model's; an unknown name is its own target."""
        record = self.catalogue.find(tenant, name)
        if record is not None:
            return Target(record.base, record.digest, record.is_public)
        known = self._of_engines().get(name)
        return Target(name) if known is None else Target(known.base, known.digest)

    def seen_by(self, tenant: Tenant) -> dict[str, NamedAdapter]:
        """Adapters that a tenant may use, by name."""
        return self._of_engines() | {
            name: NamedAdapter(each.base, each.digest, each.created_at)
            for name, each in self.catalogue.seen_by(tenant).items()
        }

    def all(self) -> list[AdapterRecord]:
        """Records of all adapters: those of the catalogue, then those that engines were started
        with."""
        started_with = [
            AdapterRecord(
                name=name,
                base=base,
                digest=adapter.digest,
                rank=adapter.rank,
                created_at=adapter.published_at,
            )
            for name, (base, adapter) in published(self._members.of(Kind.ENGINE)).items()
            if self.catalogue.owned(OPERATOR, name) is None
        ]
        return [*self.catalogue.records, *started_with]

    def _of_engines(self) -> dict[str, NamedAdapter]:
        """Adapters that engines were started with, unless the operator has given the name to
        another one."""
        found = published(self._members.of(Kind.ENGINE))
        return {
            name: NamedAdapter(base, adapter.digest, adapter.published_at)
            for name, (base, adapter) in found.items()
            if self.catalogue.owned(OPERATOR, name) is None
        }
