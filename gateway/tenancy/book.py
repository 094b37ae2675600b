"""The truth of tenants: one value a tenant in a key-value bucket of JetStream. Raises `Unavailable` without NATS.

Changes are told to every gateway over the bus. Knows nothing about keys' secrets.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from headwater.gateway.batches.durable import entries, or_unavailable
from headwater.gateway.tenancy.records import TenantRecord
from headwater.services import subjects
from headwater.services.bus import Bus
from headwater.services.errors import BadRequest, NotFound, Unavailable

BUCKET = "headwater_tenants"
HISTORY = 8
"""Versions of a tenant that the bucket keeps."""
_records = msgspec.json.Decoder(TenantRecord)


class TenantBook:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket: KeyValue | None = None

    async def all(self) -> list[TenantRecord]:
        with or_unavailable():
            bucket = await self._open()
            found = [_records.decode(entry.value or b"") async for entry in entries(bucket, ">")]
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

    async def remove(self, tenant_id: str) -> None:
        """Raises `NotFound`."""
        await self._find(tenant_id)
        with or_unavailable():
            await (await self._open()).delete(_key(tenant_id))
        await self._tell()

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

    async def _open(self) -> KeyValue:
        js = self._bus.jetstream()
        if js is None:
            raise Unavailable("tenants need NATS with JetStream", code="storage_unavailable")
        if self._bucket is None:
            try:
                self._bucket = await js.key_value(BUCKET)
            except nats.js.errors.NotFoundError:
                config = KeyValueConfig(bucket=BUCKET, history=HISTORY, storage=StorageType.FILE)
                self._bucket = await js.create_key_value(config)
        return self._bucket


def _key(tenant_id: str) -> str:
    return tenant_id.encode().hex()
