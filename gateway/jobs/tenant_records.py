"""Records of tenants in a signed bucket, each under its tenant and id. Knows nothing about their
contents."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Generic, TypeVar

import nats.js.errors

from headwater.services.runtime import subjects
from headwater.services.runtime.errors import NotFound

from ..buckets import Missing, is_wrong_sequence
from ..signed_bucket import SignedBucket
from .durable import Durable

RecordT = TypeVar("RecordT")


class TenantRecords(Generic[RecordT]):
    """Records of one kind. Methods raise NATS's errors, and `Unavailable` without NATS; methods
    about one record raise `NotFound`, also for another tenant's."""

    def __init__(
        self,
        durable: Durable,
        room: str,
        kind: str,
        decode: Callable[[bytes], RecordT],
        encode: Callable[[RecordT], bytes],
    ) -> None:
        """`room` is the bucket's name in `Rooms`, `kind` the name of a record in errors."""
        self._durable = durable
        self._kind = kind
        self._decode = decode
        self._encode = encode
        self._bucket_of: Callable[[object], SignedBucket] = attrgetter(room)

    async def bucket(self) -> SignedBucket:
        return self._bucket_of(await self._durable.rooms())

    async def create(self, tenant: str, record_id: str, record: RecordT) -> None:
        """Writes a record whose id is new."""
        await (await self.bucket()).create(_key(tenant, record_id), self._encode(record))

    async def get(self, tenant: str, record_id: str) -> RecordT:
        return self._decode((await self.value(tenant, record_id))[0])

    async def all(self, tenant: str) -> list[RecordT]:
        """Records of a tenant."""
        found = (await self.bucket()).all(_key(tenant, ">"))
        return [self._decode(value) async for _, value in found]

    async def change(
        self, tenant: str, record_id: str, change: Callable[[RecordT], None]
    ) -> RecordT:
        """Changes the current record, also while other processes change it. `change` may raise,
        which leaves the record as it is."""
        bucket = await self.bucket()
        while True:
            value, revision = await self.value(tenant, record_id)
            change(record := self._decode(value))
            try:
                await bucket.update(_key(tenant, record_id), self._encode(record), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return record

    async def conclude(self, tenant: str, record_id: str, check: Callable[[RecordT], None]) -> None:
        """Drops the current record, also while other processes change it. `check` may raise, which
        leaves the record as it is."""
        bucket = await self.bucket()
        while True:
            value, revision = await self.value(tenant, record_id)
            check(self._decode(value))
            try:
                await bucket.delete(_key(tenant, record_id), last=revision)
            except nats.js.errors.APIError as refused:
                if not is_wrong_sequence(refused):
                    raise
                continue
            return

    async def drop(self, tenant: str, record_id: str) -> None:
        """Drops a record, also while storage is full."""
        await self.value(tenant, record_id)
        await (await self.bucket()).drop(_key(tenant, record_id))

    async def drop_all(self, tenant: str) -> None:
        """Drops the records of a tenant that was removed."""
        await (await self.bucket()).drop(_key(tenant, ">"))

    async def value(self, tenant: str, record_id: str) -> tuple[bytes, int]:
        """Value of a record and its revision."""
        try:
            return await (await self.bucket()).get(_key(tenant, record_id))
        except (Missing, nats.js.errors.InvalidKeyError):
            raise NotFound(self._kind, record_id) from None


def _key(tenant: str, record_id: str) -> str:
    """Key of a record; `>`: of all of a tenant's."""
    return f"{subjects.key_of(tenant)}.{record_id}"
