"""The tenants as one gateway knows them: read when it starts, when something changes, and once a
minute in any case.

The tenants that were read stay while NATS is away; a gateway that starts then uses those that a
gateway of this machine read last. Knows the owners of keys; knows nothing about limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import structlog

from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.key_file import ADMIN_TENANT
from headwater.services.runtime.listeners import call_each
from headwater.services.runtime.tasks import owned_task, set_within

from .records import Key, Removed, Scope, TenantRecord
from .snapshot import Snapshot
from .tenant_store import TenantStore
from .tenants import (
    MARK,
    AdminKeys,
    KeyedTenants,
    Tenant,
    checked_name,
    key_of,
    key_revoked,
)

PREFIX = "hw"
_OF_FILE = f"file{MARK}"
_NAMED_BY_ADMIN = f"admin{MARK}"
"""Prefixes of the keys of tenants whose names are not their keys."""
READ_AGAIN_SECONDS = 60.0
RETRY_SECONDS = 1.0
_UNKNOWN_DIGEST = secrets.token_bytes(32)
"""Digest that a key with an unknown name is compared with, so that the comparison takes as long as
another."""


def new_key(*, expires_at: float | None = None) -> tuple[Key, str]:
    """A new key as it is stored, and its secret, which is shown only once."""
    key_id = secrets.token_hex(6)
    secret = secrets.token_urlsafe(32)
    text = f"{PREFIX}-{key_id}-{secret}"
    return Key(id=key_id, digest=_digest(text), created_at=time.time(), expires_at=expires_at), text


class TenantDirectory:
    """Finds tenants by key. An administrator's key may ask in any tenant's name."""

    def __init__(
        self,
        tenant_store: TenantStore,
        admins: AdminKeys,
        file: KeyedTenants | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """`file` holds tenants without limits and their keys."""
        self.tenant_store = tenant_store
        self._admins = admins
        self._file = file
        self._snapshot = snapshot or Snapshot("")
        self._records: dict[str, TenantRecord] = {}
        """Records by name."""
        self._by_key: dict[str, TenantRecord] = {}
        """Records by `Tenant.key`."""
        self._keys: dict[str, tuple[Key, TenantRecord]] = {}
        self._retired: set[str] = set()
        """Keys of tenants that were removed."""
        self._is_read = False
        self._reading = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after tenants were read again, and when a key has expired."""
        self._listeners.append(listener)

    @contextlib.asynccontextmanager
    async def running(self, bus: Bus) -> AsyncIterator[TenantDirectory]:
        """Follows the tenant store inside the `with` block; the scope begins with the tenants that
        are there, if they can be read."""
        changed = asyncio.Event()
        bus.on_connected(changed.set)
        async with bus.subscribe(subjects.TENANTS_CHANGED) as words:
            if not await self.read() and (records := self._snapshot.load()) is not None:
                structlog.get_logger().warning(
                    "tenants are those that were read last", known=len(records)
                )
                self._know(records)
            async with (
                owned_task(self._follow_changes(words, changed)),
                owned_task(self._follow(changed)),
            ):
                yield self

    async def read(self) -> bool:
        """Reads the records. False where they cannot be read."""
        # One read at a time: the records of an earlier one would replace newer ones if it ended
        # later, and a revoked key would count again.
        async with self._reading:
            try:
                # Removals before records: a tenant that is put back between the two reads is among
                # the records then.
                removed = await self.tenant_store.removed()
                records = await self.tenant_store.all()
            except (errors.Unavailable, msgspec.MsgspecError) as failure:
                # A record of a later version cannot be read here: the old records stay in use.
                structlog.get_logger().warning(
                    "tenants cannot be read", error=str(failure), known=len(self._records)
                )
                return False
            self._know(records, removed)
        self._emit()
        await asyncio.to_thread(self._snapshot.save, records)
        return True

    def _know(self, records: Sequence[TenantRecord], removed: Sequence[Removed] = ()) -> None:
        self._records = {record.id: record for record in records}
        self._by_key = {record.key: record for record in records}
        self._retired = {each.key for each in removed}
        self._keys = {key.id: (key, record) for record in records for key in record.keys}
        self._is_read = True

    def identify(self, authorization: str, tenant_name: str) -> Tenant:
        """Identifies a tenant by key. Raises `Unauthenticated`; `Unavailable` while the records
        cannot be read."""
        key = key_of(authorization)
        _, _, rest = key.partition("-")
        key_id, _, _ = rest.partition("-")
        known, record = self._keys.get(key_id, (None, None))
        fits = hmac.compare_digest(
            known.digest if known is not None else _UNKNOWN_DIGEST, _digest(key)
        )
        if fits and known is not None and record is not None and known.is_valid(time.time()):
            return dataclasses.replace(record.tenant, key_id=known.id)
        if self._admins.name_of(authorization):
            return self._in_the_name_of(tenant_name)
        if self._file is not None and (tenant := self._file.find(key)) is not None:
            return self._apart(tenant)
        if not self._is_read:
            raise errors.Unavailable("the tenants are not known yet", code="storage_unavailable")
        raise errors.Unauthenticated("the API key is not known")

    def check(self, tenant: Tenant) -> None:
        """Raises `KeyRevoked` for a tenant, or a key of one, that was removed; `Unavailable` while
        the records cannot be read."""
        self._record_of(tenant)

    def scopes(self, tenant: Tenant, model: str) -> list[Scope]:
        """Scopes whose limits count; none for a tenant that is not in the tenant store. Raises as
        `check` does."""
        record = self._record_of(tenant)
        return record.scopes(tenant.key_id, model) if record is not None else []

    def escapes_special_tokens(self, tenant: Tenant) -> bool:
        record = self._by_key.get(tenant.key)
        return record is not None and record.escape_special_tokens

    def records(self) -> list[TenantRecord]:
        """The tenants that are kept, by name."""
        return sorted(self._records.values(), key=lambda record: record.id)

    def record(self, tenant: Tenant) -> TenantRecord | None:
        """The tenant's record; None for tenants of the key file, and administrators."""
        return self._by_key.get(tenant.key)

    def storage(self, key: str) -> tuple[int | None, int | None]:
        """Storage limits of a tenant's own, by its key: of files, and of responses."""
        record = self._by_key.get(key)
        return (record.file_bytes, record.response_bytes) if record is not None else (None, None)

    def adapters(self, key: str) -> tuple[int | None, int | None]:
        """A tenant's own limits of adapters that it brings, by its key: number and bytes."""
        record = self._by_key.get(key)
        return (record.adapters, record.adapter_bytes) if record is not None else (None, None)

    def is_gone(self, key: str) -> bool:
        """Whether the tenant of this key was removed. False while the records cannot be read."""
        was_kept = key in self._retired or key.startswith(f"t{MARK}")
        return self._is_read and was_kept and key not in self._by_key

    def _record_of(self, tenant: Tenant) -> TenantRecord | None:
        """Record of a tenant; None for administrators and tenants of the key file."""
        record = self._by_key.get(tenant.key)
        if record is not None:
            if tenant.key_id and not any(
                key.id == tenant.key_id and key.is_valid(time.time()) for key in record.keys
            ):
                raise key_revoked(tenant)
            return record
        if tenant.key == ADMIN_TENANT or tenant.key.startswith(_NAMED_BY_ADMIN):
            return None
        if self._file is not None and self._file.has(tenant) and tenant.key not in self._retired:
            return None
        if not self._is_read:
            raise errors.Unavailable("the tenants are not known yet", code="storage_unavailable")
        raise key_revoked(tenant)

    def _in_the_name_of(self, tenant_name: str) -> Tenant:
        if not tenant_name:
            return Tenant(id=ADMIN_TENANT)
        if (record := self._records.get(checked_name(tenant_name))) is not None:
            return record.tenant
        if self._file is not None and (tenant := self._file.named(tenant_name)) is not None:
            return self._apart(tenant)
        return Tenant(id=tenant_name, uid=_NAMED_BY_ADMIN + tenant_name)

    def _apart(self, tenant: Tenant) -> Tenant:
        """A tenant of the key file. Its name is its key, except where that is, was, or may be the
        key of a tenant of the tenant store whose record was made before there were ids."""
        is_free = self._is_read and tenant.id not in self._by_key and tenant.id not in self._retired
        return tenant if is_free else dataclasses.replace(tenant, uid=_OF_FILE + tenant.id)

    async def _follow(self, changed: asyncio.Event) -> None:
        while True:
            await set_within(changed, min(READ_AGAIN_SECONDS, self._seconds_to_expiry()))
            changed.clear()
            self._emit()
            if not await self.read():
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow_changes(self, words: Subscription, changed: asyncio.Event) -> None:
        async for word in words:
            self.tenant_store.on_changed(word.payload)
            changed.set()

    def _seconds_to_expiry(self) -> float:
        """Seconds until the next key expires."""
        now = time.time()
        ends = [
            key.expires_at - now for key, _ in self._keys.values() if key.expires_at is not None
        ]
        return min((seconds for seconds in ends if seconds > 0), default=READ_AGAIN_SECONDS)

    def _emit(self) -> None:
        call_each(self._listeners)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
