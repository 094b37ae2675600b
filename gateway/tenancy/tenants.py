"""Tenants, found by key, or by name where no keys are set. Knows nothing about limits."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from headwater.services.runtime import errors
from headwater.services.runtime.key_file import (
    ADMIN_TENANT,
    NAME,
    OPEN_TENANT,
    admins_by_key,
    digest_of,
    tenants_by_key,
)
from headwater.services.runtime.settings import SettingError

MARK = "~"
"""Prefix of tenant keys that are no names; no name has it."""
KEY_ID_LEN = 12
MIN_ADMIN_KEY_LEN = 16
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The tenant of a request, and its weight against others."""

    id: str
    """Name of the tenant, for people and metrics."""
    uid: str = ""
    """Id of its record, drawn when that was made; empty for a tenant without a record."""
    weight: float = 1.0
    tier: int = 0
    """Strict priority; lower runs first. A request may only lower itself."""
    ttft_goal_ms: int = 0
    """Goal for the time to the first token; 0: there is none."""
    tpot_goal_ms: int = 0
    """Goal for the time of each later token."""
    key_id: str = ""
    """Id of the key that the request came with, where keys have names."""
    shared_cache: bool = False
    """Whether it shares cached prefixes with all other tenants with this setting."""

    key: str = field(init=False, repr=False, compare=False)
    """Key under which the tenant's data is kept and counted. A later tenant of the same name has
    another key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.uid or self.id)


_OPEN = Tenant(id=OPEN_TENANT)


@dataclass(frozen=True, slots=True)
class OpenTenants:
    """Tenants without keys: every caller is the open tenant, or the one that `x-tenant` names."""

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        if tenant_name == ADMIN_TENANT:
            raise errors.BadRequest.of("x-tenant", tenant_name, "a name that is not reserved")
        return Tenant(id=checked_name(tenant_name)) if tenant_name else _OPEN

    def check(self, tenant: Tenant) -> None:
        """Accepts every tenant: any name is valid."""

    def escapes_special_tokens(self, tenant: Tenant) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class KeyedTenants:
    """Tenants by key. Only digests of the keys are kept."""

    tenants: dict[bytes, Tenant] = field(repr=False)
    """Tenants by the SHA-256 of their key."""

    @classmethod
    def read(cls, path: Path) -> KeyedTenants:
        """Reads a file with one `tenant key` a line; empty lines and those that begin with # are
        skipped."""
        return cls(
            {
                digest: Tenant(id=name, key_id=digest.hex()[:KEY_ID_LEN])
                for digest, name in tenants_by_key(path).items()
            }
        )

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        found = self.find(key_of(authorization))
        if found is None:
            raise errors.Unauthenticated("the API key is not known")
        return found

    def check(self, tenant: Tenant) -> None:
        if not self.has(tenant):
            raise key_revoked(tenant)

    def escapes_special_tokens(self, tenant: Tenant) -> bool:
        return False

    def find(self, key: str) -> Tenant | None:
        return _found(self.tenants, key)

    def named(self, name: str) -> Tenant | None:
        """A tenant of that name, with no key in particular."""
        return Tenant(id=name) if any(each.id == name for each in self.tenants.values()) else None

    def has(self, tenant: Tenant) -> bool:
        """Whether the file has the tenant, and the key that it used, if that is known."""
        return any(
            each.id == tenant.id and tenant.key_id in ("", each.key_id)
            for each in self.tenants.values()
        )


@dataclass(frozen=True, slots=True)
class AdminKeys:
    """Administrators, by key."""

    names: dict[bytes, str] = field(repr=False)
    """Names by the SHA-256 of the key."""

    @classmethod
    def read(cls, key: str, path: str) -> AdminKeys:
        """Reads the key as given, or a file with one `name key` a line. With neither there are no
        administrators."""
        if key and len(key) < MIN_ADMIN_KEY_LEN:
            raise SettingError("admin_key", "***", f"at least {MIN_ADMIN_KEY_LEN} characters")
        names = {digest_of(key): "admin"} if key else {}
        return cls(names | (admins_by_key(Path(path)) if path else {}))

    def name_of(self, authorization: str) -> str | None:
        """Name of the administrator. Raises `Unauthenticated` when there is no key at all."""
        return _found(self.names, key_of(authorization))


@dataclass(frozen=True, slots=True)
class KnownTenant:
    """The tenant of a request that the gateway itself makes: it was identified before."""

    tenant: Tenant

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        return self.tenant


class Identity(Protocol):
    def identify(self, authorization: str, tenant_name: str) -> Tenant: ...


class Tenants(Identity, Protocol):
    def check(self, tenant: Tenant) -> None:
        """Checks a tenant that was identified before. Raises `KeyRevoked` when its key or the
        tenant itself is gone."""
        ...

    def escapes_special_tokens(self, tenant: Tenant) -> bool:
        """Whether special tokens in the tenant's conversations are text, in every request."""
        ...


def key_revoked(tenant: Tenant) -> errors.KeyRevoked:
    return errors.KeyRevoked(
        f"the key of tenant {tenant.id} was revoked or has expired, or the tenant was removed"
    )


def authorization_of(headers: Mapping[str, str]) -> str:
    """The header `authorization` of a request. A key in `x-api-key`, where Anthropic's clients put
    it, or in `api-key`, where Azure's do, counts as one unless the request has a key there too."""
    authorization = headers.get("authorization", "")
    key = headers.get("x-api-key", "").strip() or headers.get("api-key", "").strip()
    has_bearer = authorization[:6].lower() == "bearer"
    return f"Bearer {key}" if key and not has_bearer else authorization


def tenant_of(tenants: Identity, headers: Mapping[str, str]) -> Tenant:
    """Tenant of a request with these headers. Raises what `Identity.identify` raises."""
    return tenants.identify(authorization_of(headers), headers.get("x-tenant", ""))


def key_of(authorization: str) -> str:
    """Key in the headers. Raises `Unauthenticated` when there is none."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise errors.Unauthenticated(
            "this API needs a key: send `authorization: Bearer KEY` or `x-api-key: KEY`"
        )
    return key.strip()


def checked_name(name: str) -> str:
    """The name, checked. Raises `BadRequest`."""
    if NAME.fullmatch(name) is None:
        raise errors.BadRequest.of("x-tenant", name, "1 to 64 letters, digits, '.', '_' and '-'")
    return name


def _found(by_digest: Mapping[bytes, FoundT], key: str) -> FoundT | None:
    # Every key is compared, each in constant time: the duration reveals nothing about similar keys.
    given = digest_of(key)
    found = None
    for digest, owner in by_digest.items():
        if hmac.compare_digest(digest, given):
            found = owner
    return found
