"""The truth of tenants: one value a tenant in a key-value bucket of JetStream. Raises `Unavailable` without NATS.

Changes are told to every gateway over the bus. Records that the cluster's key did not sign are not there. Knows nothing
about keys' secrets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from headwater.gateway.batches.durable import entries, or_unavailable
from headwater.gateway.tenancy.record_seal import RecordSeals
from headwater.gateway.tenancy.records import TenantRecord
from headwater.services import subjects
from headwater.services.bus import Bus
from headwater.services.errors import BadRequest, NotFound, Unavailable

BUCKET = "headwater_tenants"
HISTORY = 8
"""Versions of a tenant that the bucket keeps."""
_records = msgspec.json.Decoder(TenantRecord)


class TenantBook:
    def __init__(self, bus: Bus, *, adopts_unsigned: bool = False) -> None:
        self._bus = bus
        self._seals = RecordSeals(BUCKET, adopts_unsigned=adopts_unsigned)
        self._bucket: KeyValue | None = None
        self._to_sign: dict[str, tuple[TenantRecord, int]] = {}
        """Records that are believed, and whose seal is missing or old, with their revisions."""

    async def all(self) -> list[TenantRecord]:
        with or_unavailable():
            bucket = await self._open()
            found = [record async for entry in entries(bucket, ">") if (record := self._read(entry)) is not None]
            for record, revision in list(self._to_sign.values()):
                await self._sign_again(record, revision)
        return sorted(found, key=lambda record: record.id)

    async def get(self, tenant_id: str) -> TenantRecord:
        """Raises `NotFound`."""
        return (await self._find(tenant_id))[0]

    async def add(self, record: TenantRecord) -> None:
        """Raises `BadRequest` when there is one of that name."""
        with or_unavailable():
            bucket = await self._open()
            try:
                await bucket.create(_key(record.id), self._sealed(record))
            except nats.js.errors.KeyWrongLastSequenceError:
                there = await bucket.get(_key(record.id))
                if self._read(there) is not None:
                    raise BadRequest.of("id", record.id, "a name that no tenant has") from None
                # A stranger's record keeps no name.
                await bucket.update(_key(record.id), self._sealed(record), last=there.revision)
        await self._tell()

    async def change(self, tenant_id: str, change: Callable[[TenantRecord], TenantRecord]) -> TenantRecord:
        """Applies `change` to what is there, whoever else changes it meanwhile. Raises `NotFound`."""
        while True:
            record, revision = await self._find(tenant_id)
            changed = change(record)
            with or_unavailable():
                bucket = await self._open()
                try:
                    await bucket.update(_key(tenant_id), self._sealed(changed), last=revision)
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
        if (record := self._read(entry)) is None:
            raise NotFound("tenant", tenant_id)
        return record, entry.revision or 0

    def _sealed(self, record: TenantRecord) -> bytes:
        return self._seals.seal(_key(record.id), msgspec.json.encode(record))

    def _read(self, entry: KeyValue.Entry) -> TenantRecord | None:
        """None for a record that is not believed."""
        if (opened := self._seals.open(entry.key, entry.value or b"")) is None:
            return None
        record = _records.decode(opened.value)
        if not opened.is_current:
            self._to_sign[entry.key] = record, entry.revision or 0
        return record

    async def _sign_again(self, record: TenantRecord, revision: int) -> None:
        """Signs a record that an earlier version, or an earlier token, left; unless it was changed meanwhile."""
        self._to_sign.pop(_key(record.id), None)
        with contextlib.suppress(nats.js.errors.KeyWrongLastSequenceError):
            await (await self._open()).update(_key(record.id), self._sealed(record), last=revision)

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
