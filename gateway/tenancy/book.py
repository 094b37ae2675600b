"""The truth of tenants: one value a tenant in a key-value bucket of JetStream. Raises `Unavailable` without NATS.

Changes are told to every gateway over the bus. Knows nothing about keys' secrets.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import nats.js.errors
import structlog
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from headwater.gateway.batches.durable import drop_keys, entries, is_full, or_unavailable
from headwater.gateway.tenancy.records import Removed, TenantRecord
from headwater.services import subjects
from headwater.services.bus import Bus
from headwater.services.errors import BadRequest, NotFound, Unavailable

BUCKET = "headwater_tenants"
HISTORY = 8
"""Versions of a tenant that the bucket keeps."""
_REMOVED = "removed"
"""What keys of removed tenants begin with; those of tenants have no dot."""
_records = msgspec.json.Decoder(TenantRecord)
_removed = msgspec.json.Decoder(Removed)


class TenantBook:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket: KeyValue | None = None

    async def make(self) -> None:
        """The bucket, unless it is there."""
        with or_unavailable():
            await self._open()

    async def all(self) -> list[TenantRecord]:
        with or_unavailable():
            bucket = await self._open()
            found = [_records.decode(entry.value or b"") async for entry in entries(bucket, "*")]
        return sorted(found, key=lambda record: record.id)

    async def get(self, tenant_id: str) -> TenantRecord:
        """Raises `NotFound`."""
        return (await self._find(tenant_id))[0]

    async def add(self, record: TenantRecord) -> None:
        """Raises `BadRequest` when there is one of that name."""
        with or_unavailable():
            bucket = await self._open()
            try:
                await bucket.create(_key(record.id), msgspec.json.encode(record))
            except nats.js.errors.KeyWrongLastSequenceError:
                raise BadRequest.of("id", record.id, "a name that no tenant has") from None
        await self._tell()

    async def change(self, tenant_id: str, change: Callable[[TenantRecord], TenantRecord]) -> TenantRecord:
        """Applies `change` to what is there, whoever else changes it meanwhile. Raises `NotFound`."""
        while True:
            record, revision = await self._find(tenant_id)
            changed = change(record)
            with or_unavailable():
                bucket = await self._open()
                try:
                    await bucket.update(_key(tenant_id), msgspec.json.encode(changed), last=revision)
                except nats.js.errors.KeyWrongLastSequenceError:
                    continue
            await self._tell()
            return changed

    async def remove(self, tenant_id: str) -> Removed:
        """Raises `NotFound`. What the tenant leaves behind is known from `removed` until it is cleared."""
        record, _ = await self._find(tenant_id)
        removed = Removed(key=record.key)
        with or_unavailable():
            bucket = await self._open()
            try:
                await bucket.put(_removed_key(removed), msgspec.json.encode(removed))
            except nats.js.errors.APIError as refused:
                # A server that is full though this bucket has room is one that streams without bounds have filled.
                if not is_full(refused):
                    raise
                structlog.get_logger().warning("a removal cannot be noted: storage is full", key=removed.key)
            # NOTE: the bucket's own `delete` writes a mark, for which a full one has no room.
            await drop_keys(self._js(), BUCKET, _key(tenant_id))
        await self._tell()
        return removed

    async def removed(self) -> list[Removed]:
        with or_unavailable():
            bucket = await self._open()
            return [_removed.decode(entry.value or b"") async for entry in entries(bucket, f"{_REMOVED}.*")]

    async def cleared(self, removed: Removed) -> None:
        """Nothing is left of that tenant."""
        with or_unavailable():
            if removed.is_name:
                done = msgspec.structs.replace(removed, is_cleared=True)
                await (await self._open()).put(_removed_key(removed), msgspec.json.encode(done))
            else:
                await drop_keys(self._js(), BUCKET, _removed_key(removed))

    async def _find(self, tenant_id: str) -> tuple[TenantRecord, int]:
        with or_unavailable():
            bucket = await self._open()
            try:
                entry = await bucket.get(_key(tenant_id))
            except nats.js.errors.NotFoundError:
                raise NotFound("tenant", tenant_id) from None
        return _records.decode(entry.value or b""), entry.revision or 0

    async def _tell(self) -> None:
        await self._bus.publish(subjects.TENANTS_CHANGED, b"")

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
