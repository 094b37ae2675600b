"""Who asks: a tenant by its key, or anyone by name where no keys are set. Knows nothing about limits."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from headwater.services import errors
from headwater.services.settings import SettingError

OPEN_TENANT = "open"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whom an answer is for and how it is weighed against others'."""

    id: str
    weight: float = 1.0
    tier: int = 0
    """Strict priority; lower runs first. A request may only lower itself."""
    key_id: str = ""
    """Of the key that it came with, where keys have names."""
    shared_cache: bool = False
    """It hits the cached prefixes of all tenants that share theirs, and they its."""


@dataclass(frozen=True, slots=True)
class OpenTenants:
    """No keys: everyone is the open tenant, or the one that `x-tenant` names."""

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        if not tenant_name:
            return Tenant(id=OPEN_TENANT)
        if NAME.fullmatch(tenant_name) is None:
            raise errors.BadRequest.of("x-tenant", tenant_name, "1 to 64 letters, digits, '.', '_' and '-'")
        return Tenant(id=tenant_name)


@dataclass(frozen=True, slots=True)
class KeyedTenants:
    """Tenants by key. Only digests of the keys are kept."""

    tenants: dict[bytes, Tenant] = field(repr=False)
    """By SHA-256 of the key."""

    @classmethod
    def read(cls, path: Path) -> KeyedTenants:
        """From a file with one `tenant key` a line; empty lines and those that begin with # are skipped."""
        tenants = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or NAME.fullmatch(words[0]) is None:
                raise SettingError("api_key_file", f"{path}:{number}", "lines of the form `tenant key`")
            tenants[_digest(words[1])] = Tenant(id=words[0])
        if not tenants:
            raise SettingError("api_key_file", str(path), "a file with at least one key")
        return cls(tenants)

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise errors.Unauthenticated("this API needs a key: send `authorization: Bearer KEY`")
        given, found = _digest(key.strip()), None
        # Every key is compared, each in constant time: how long it takes says nothing about which were close.
        for digest, tenant in self.tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise errors.Unauthenticated("the API key is not known")
        return found


@dataclass(frozen=True, slots=True)
class KnownTenant:
    """For requests that the gateway itself makes: whose they are was found out before."""

    tenant: Tenant

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        return self.tenant


Tenants = OpenTenants | KeyedTenants | KnownTenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
