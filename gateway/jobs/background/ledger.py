"""Records of background responses, and the queue of those that no gateway has taken yet. Knows
nothing about computing them."""

from __future__ import annotations

import msgspec
from nats.aio.msg import Msg

from headwater.services.runtime import subjects

from ..durable import Durable
from ..tenant_records import TenantRecords
from ..work_lease import WorkLease, next_of
from .events import log_of
from .records import Record


class _Name(msgspec.Struct):
    """A message of the queue."""

    tenant: str
    response_id: str


class HeldResponse(WorkLease):
    """A response that this process computes."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        name = msgspec.msgpack.decode(message.data, type=_Name)
        self.tenant = name.tenant
        self.response_id = name.response_id


class BackgroundLedger(TenantRecords[Record]):
    """Records of background responses by tenant and id."""

    def __init__(self, durable: Durable) -> None:
        decode = msgspec.msgpack.Decoder(Record).decode
        super().__init__(durable, "background", "response", decode, msgspec.msgpack.encode)

    async def add(self, record: Record) -> None:
        await self.create(record.tenant.key, record.id, record)
        name = _Name(record.tenant.key, record.id)
        rooms = await self._durable.rooms()
        await rooms.js.publish(subjects.BACKGROUND_JOBS, msgspec.msgpack.encode(name))

    async def drop_all(self, tenant: str) -> None:
        """Drops the records of a tenant that was removed, and their events."""
        await super().drop_all(tenant)
        await log_of(self._durable, tenant, ">").drop()

    async def next(self) -> HeldResponse:
        """Waits for the next response."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.background_jobs, HeldResponse)
