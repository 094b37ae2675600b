"""The store of tenants: one value a tenant in a key-value bucket of JetStream. Raises `Unavailable`
without NATS.

Changes are published to every gateway over the bus. Records and removals that the cluster's key did
not sign are ignored, as are records that are older than the last one written in their place. Knows
nothing about keys' secrets.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import nats.js.errors
import structlog
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import BadRequest, NotFound, Unavailable
from headwater.services.runtime.freshness import now_ms
from headwater.services.runtime.record_seal import RecordSeals

from ..buckets import drop_keys, entries, is_full, or_unavailable
from .last_written import LastWritten
from .records import Removed, TenantRecord

BUCKET = "headwater_tenants"
HISTORY = 8
"""Number of versions of a tenant that the bucket keeps."""
_REMOVED = "removed"
"""Prefix of the keys of removed tenants; keys of tenants have no dot."""
_records = msgspec.json.Decoder(TenantRecord)
_removed = msgspec.json.Decoder(Removed)
_times = msgspec.json.Decoder(dict[str, int])


class TenantStore:
    def __init__(
        self, bus: Bus, last_written: LastWritten | None = None, *, adopts_unsigned: bool = False
    ) -> None:
        self._bus = bus
        self._last_written = last_written or LastWritten()
        self._seals = RecordSeals(BUCKET, adopts_unsigned=adopts_unsigned)
        self._bucket: KeyValue | None = None
        self._to_sign: dict[str, tuple[bytes, int]] = {}
        """Trusted values whose seal is missing or old, with their revisions, by key."""

    async def make(self) -> None:
        """Makes the bucket, unless it is there."""
        with or_unavailable():
            await self._open()

    async def all(self) -> list[TenantRecord]:
        """All tenants, by name."""
        await self._last_written.read()
        with or_unavailable():
            await self._open()
            every = entries(self._js(), BUCKET, "*")
            found = [record async for entry in every if (record := self._read(entry)) is not None]
            await self._sign_again()
        await self._last_written.keep()
        return sorted(found, key=lambda record: record.id)

    def on_changed(self, payload: bytes) -> None:
        """Notes the times that another gateway published with a change, which NATS may have lost
        since."""
        try:
            self._last_written.note(_times.decode(payload or b"{}"))
        except msgspec.DecodeError as failure:
            structlog.get_logger().warning(
                "a change of tenants is not understood", error=str(failure)
            )

    async def get(self, tenant_id: str) -> TenantRecord:
        """Record of a tenant. Raises `NotFound`."""
        return (await self._find(tenant_id))[0]

    async def add(self, record: TenantRecord) -> None:
        """Adds a tenant. Raises `BadRequest` if the name is taken."""
        # The record of an earlier tenant of that name has the time of its removal.
        await self._last_written.read()
        await self.removed()
        key = _key(record.id)
        with or_unavailable():
            bucket = await self._open()
            try:
                await bucket.create(key, sealed := self._sealed(record))
            except nats.js.errors.KeyWrongLastSequenceError:
                there = await bucket.get(key)
                if self._read(there) is not None:
                    raise BadRequest.of("id", record.id, "a name that no tenant has") from None
                # A record without a valid seal does not reserve its name.
                await bucket.update(key, sealed := self._sealed(record), last=there.revision)
        await self._publish(key, self._seals.time_of(sealed))

    async def change(
        self, tenant_id: str, change: Callable[[TenantRecord], TenantRecord]
    ) -> TenantRecord:
        """Applies `change` to the current record, also while other processes change it. Raises
        `NotFound`."""
        while True:
            record, revision = await self._find(tenant_id)
            changed = change(record)
            with or_unavailable():
                bucket = await self._open()
                try:
                    await bucket.update(
                        _key(tenant_id), sealed := self._sealed(changed), last=revision
                    )
                except nats.js.errors.KeyWrongLastSequenceError:
                    continue
            await self._publish(_key(tenant_id), self._seals.time_of(sealed))
            return changed

    async def remove(self, tenant_id: str) -> Removed:
        """Removes a tenant. Raises `NotFound`. `removed` lists its remaining data until it is
        cleared."""
        record, _ = await self._find(tenant_id)
        key = _key(tenant_id)
        removed = Removed(
            key=record.key,
            id=tenant_id,
            written_before=max(now_ms(), self._last_written.of(key) + 1),
        )
        with or_unavailable():
            bucket = await self._open()
            try:
                await bucket.put(*self._sealed_removal(removed))
            except nats.js.errors.APIError as refused:
                # Streams without bounds may have filled a server although this bucket has room.
                if not is_full(refused):
                    raise
                structlog.get_logger().warning(
                    "a removal cannot be noted: storage is full", key=removed.key
                )
            # NOTE: the bucket's own `delete` writes a mark, for which a full one has no room.
            await drop_keys(self._js(), BUCKET, key)
        await self._publish(key, removed.written_before)
        return removed

    async def removed(self) -> list[Removed]:
        with or_unavailable():
            await self._open()
            values = [
                self._opened(entry) async for entry in entries(self._js(), BUCKET, f"{_REMOVED}.*")
            ]
            await self._sign_again()
        found = [_removed.decode(value) for value in values if value is not None]
        self._last_written.note({_key(each.id): each.written_before for each in found if each.id})
        return found

    async def cleared(self, removed: Removed) -> None:
        """Notes that none of that tenant's data is left."""
        with or_unavailable():
            if removed.is_name:
                done = msgspec.structs.replace(removed, is_cleared=True)
                await (await self._open()).put(*self._sealed_removal(done))
            else:
                await drop_keys(self._js(), BUCKET, _removed_key(removed))

    async def _find(self, tenant_id: str) -> tuple[TenantRecord, int]:
        with or_unavailable():
            bucket = await self._open()
            try:
                entry = await bucket.get(_key(tenant_id))
            except nats.js.errors.NotFoundError:
                raise NotFound("tenant", tenant_id) from None
        if (record := self._read(entry)) is None:
            raise NotFound("tenant", tenant_id)
        return record, entry.revision or 0

    def _sealed(self, record: TenantRecord) -> bytes:
        return self._seal(_key(record.id), msgspec.json.encode(record))

    def _sealed_removal(self, removed: Removed) -> tuple[str, bytes]:
        """Key and value of a removal. It has a seal: without one, any writer to the bucket could
        have any tenant's data deleted."""
        key = _removed_key(removed)
        return key, self._seal(key, msgspec.json.encode(removed))

    def _seal(self, key: str, value: bytes) -> bytes:
        return self._seals.seal(key, value, after=self._last_written.of(key))

    def _read(self, entry: KeyValue.Entry) -> TenantRecord | None:
        """Record of a value; None for one that is not trusted."""
        value = self._opened(entry)
        return None if value is None else _records.decode(value)

    def _opened(self, entry: KeyValue.Entry) -> bytes | None:
        """Contents of a value; None for one that is not trusted."""
        opened = self._seals.open(
            entry.key, entry.value or b"", not_before=self._last_written.of(entry.key)
        )
        if opened is None:
            return None
        self._last_written.note({entry.key: opened.at})
        if not opened.is_current:
            self._to_sign[entry.key] = opened.value, entry.revision or 0
        return opened.value

    async def _sign_again(self) -> None:
        """Signs values that an earlier version wrote or an earlier token signed, unless they were
        changed meanwhile."""
        bucket = await self._open()
        while self._to_sign:
            key, (value, revision) = self._to_sign.popitem()
            try:
                await bucket.update(key, self._seal(key, value), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            except nats.js.errors.APIError as refused:
                # A full server does not keep records from being read; the next reading signs.
                if not is_full(refused):
                    raise

    async def _publish(self, key: str, at: int) -> None:
        """Publishes a change of that record to every gateway, and keeps its time in the places that
        outlive them."""
        self._last_written.note({key: at})
        await self._bus.publish(subjects.TENANTS_CHANGED, msgspec.json.encode({key: at}))
        await self._last_written.keep()

    def _js(self) -> JetStreamContext:
        js = self._bus.jetstream()
        if js is None:
            raise Unavailable("tenants need NATS with JetStream", code="storage_unavailable")
        return js

    async def _open(self) -> KeyValue:
        js = self._js()
        if self._bucket is None:
            try:
                self._bucket = await js.key_value(BUCKET)
            except nats.js.errors.NotFoundError:
                config = KeyValueConfig(bucket=BUCKET, history=HISTORY, storage=StorageType.FILE)
                self._bucket = await js.create_key_value(config)
        return self._bucket


def _key(tenant_id: str) -> str:
    return tenant_id.encode().hex()


def _removed_key(removed: Removed) -> str:
    return f"{_REMOVED}.{removed.key.encode().hex()}"
