"""The stored record of a tenant: identity, weight, limits, and digests of its keys. It holds no
secrets."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Literal

import msgspec

from headwater.services.runtime.key_file import RESERVED

from .tenants import MARK, Tenant

MAX_COUNT = 2**48
Count = Annotated[
    int, msgspec.Meta(ge=0, le=MAX_COUNT, description=f"a whole number, 0…{MAX_COUNT}, or null")
]
Period = Annotated[Literal["day", "month"], msgspec.Meta(description="day or month")]


class Limits(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Limits of a tenant, a key or a model. An absent limit does not restrict."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Number of tokens of prompts and answers."""
    concurrency: Count | None = None
    """Number of choices at once, over all requests."""
    budget: Count | None = None
    """Number of tokens of prompts and answers in a calendar period, UTC."""
    budget_period: Period = "month"

    @property
    def is_empty(self) -> bool:
        return self == Limits(budget_period=self.budget_period)


NO_LIMITS = Limits()


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key. Its owner has `hw-<id>-<secret>`; the record has only a digest."""

    id: str
    digest: bytes
    """SHA-256 of the whole key."""
    created_at: float
    expires_at: float | None = None
    limits: Limits = NO_LIMITS

    def is_valid(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value under a tenant's name in the bucket."""

    id: str
    uid: str = ""
    """Id that is drawn once, so that a later tenant with the same name is another one. Empty in
    records from before there were ids: the data of those tenants are stored under their names."""
    created_at: float = msgspec.field(default_factory=time.time)
    weight: float = 1.0
    tier: int = 0
    ttft_goal_ms: int = 0
    """Goal for the time to the first token, for policies with goals; 0: none."""
    tpot_goal_ms: int = 0
    """Goal for the time of each later token."""
    shared_cache: bool = False
    """Whether the tenant shares cached prefixes with every other tenant that has this set."""
    escape_special_tokens: bool = False
    """Whether special tokens in its conversations are text, also where the model's processors read
    them as tokens."""
    limits: Limits = NO_LIMITS
    models: dict[str, Limits] = {}
    """Additional limits by model."""
    file_bytes: int | None = None
    """Largest number of bytes of its files, see `StorageLimits`. None: the default of all
    tenants."""
    response_bytes: int | None = None
    adapters: int | None = None
    """Largest number of adapters that it brings. None: the default of all tenants."""
    adapter_bytes: int | None = None
    """Largest number of bytes of these."""
    keys: tuple[Key, ...] = ()

    @property
    def tenant(self) -> Tenant:
        return Tenant(
            id=self.id,
            uid=self.key,
            weight=self.weight,
            tier=self.tier,
            ttft_goal_ms=self.ttft_goal_ms,
            tpot_goal_ms=self.tpot_goal_ms,
            shared_cache=self.shared_cache,
        )

    @property
    def key(self) -> str:
        """See `Tenant.key`."""
        return self.uid or (f"book{MARK}{self.id}" if self.id in RESERVED else self.id)

    def scopes(self, key_id: str, model: str) -> list[Scope]:
        """The scopes whose limits apply to a request with that key for that model."""
        limits = {"tenant": self.limits, f"model {model}": self.models.get(model, NO_LIMITS)}
        limits |= {f"key {key.id}": key.limits for key in self.keys if key.id == key_id}
        return [Scope(name, each) for name, each in limits.items() if not each.is_empty]


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tenant that was removed, until none of its data is left."""

    key: str
    """See `Tenant.key`."""
    id: str = ""
    """Name of the tenant; empty in removals from before it was kept."""
    written_before: int = 0
    """Milliseconds since 1970: a record under that name that was written earlier belongs to the
    removed tenant, or an older one."""
    at: float = msgspec.field(default_factory=time.time)
    is_cleared: bool = False
    """Whether all of its data are deleted. Kept where the key is a name, so that no tenant of the
    key file gets that key."""

    @property
    def is_name(self) -> bool:
        return MARK not in self.key


def new_uid() -> str:
    return f"t{MARK}{secrets.token_hex(8)}"


class Scope(msgspec.Struct, frozen=True):
    """Limits, with the name of their counters within a tenant."""

    name: str
    limits: Limits
