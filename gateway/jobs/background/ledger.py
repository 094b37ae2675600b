"""Background responses, and the queue of those that wait for a gateway. Knows nothing about computing them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import nats.js.errors
from nats.aio.msg import Msg

from headwater.services.runtime import subjects
from headwater.services.runtime.errors import NotFound

from ...buckets import Missing, drop_keys, is_wrong_sequence
from ..durable import BACKGROUND, Durable
from ..work_lease import WorkLease, next_of
from .events import log_of
from .records import Record

_records = msgspec.msgpack.Decoder(Record)


class _Name(msgspec.Struct):
    """A message of the queue."""

    tenant: str
    response_id: str


class HeldResponse(WorkLease):
    """A response that this process computes."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        name = msgspec.msgpack.decode(message.data, type=_Name)
        self.tenant, self.response_id = name.tenant, name.response_id


class BackgroundLedger:
    """Records by tenant and id. Methods raise what NATS raises, and `Unavailable` without it."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def add(self, record: Record) -> None:
        rooms = await self._durable.rooms()
        await rooms.background.create(_key(record.tenant.key, record.id), msgspec.msgpack.encode(record))
        name = _Name(record.tenant.key, record.id)
        await rooms.js.publish(subjects.BACKGROUND_JOBS, msgspec.msgpack.encode(name))

    async def get(self, tenant: str, response_id: str) -> Record:
        """Record of a response. Raises `NotFound`, also for another tenant's."""
        return (await self._look_up(tenant, response_id))[0]

    async def change(self, tenant: str, response_id: str, change: Callable[[Record], None]) -> Record:
        """Changes the current record, also while other processes change it. `change` may raise, which leaves the record
        as it is."""
        rooms = await self._durable.rooms()
        while True:
            record, revision = await self._look_up(tenant, response_id)
            change(record)
            try:
                await rooms.background.update(_key(tenant, response_id), msgspec.msgpack.encode(record), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return record

    async def conclude(self, tenant: str, response_id: str, check: Callable[[Record], None]) -> None:
        """Drops the current record, also while other processes change it. `check` may raise, which leaves the record as
        it is."""
        rooms = await self._durable.rooms()
        while True:
            record, revision = await self._look_up(tenant, response_id)
            check(record)
            try:
                await rooms.background.delete(_key(tenant, response_id), last=revision)
            except nats.js.errors.APIError as refused:
                if not is_wrong_sequence(refused):
                    raise
                continue
            return

    async def drop(self, tenant: str, response_id: str) -> None:
        """Drops a record. Raises `NotFound` for one that is not there."""
        await self._look_up(tenant, response_id)
        rooms = await self._durable.rooms()
        await drop_keys(rooms.js, BACKGROUND, _key(tenant, response_id))

    async def drop_all(self, tenant: str) -> None:
        """Drops the records of a tenant that was removed, and their events."""
        rooms = await self._durable.rooms()
        await drop_keys(rooms.js, BACKGROUND, f"{subjects.key_of(tenant)}.>")
        await log_of(self._durable, tenant, ">").drop()

    async def next(self) -> HeldResponse:
        """Waits for the next response."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.background_jobs, HeldResponse)

    async def _look_up(self, tenant: str, response_id: str) -> tuple[Record, int]:
        rooms = await self._durable.rooms()
        try:
            value, revision = await rooms.background.get(_key(tenant, response_id))
        except (Missing, nats.js.errors.InvalidKeyError):
            raise NotFound("response", response_id) from None
        return _records.decode(value), revision


def _key(tenant: str, response_id: str) -> str:
    return f"{subjects.key_of(tenant)}.{response_id}"
