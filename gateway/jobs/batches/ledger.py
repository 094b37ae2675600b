"""Batches, and the queue of those that wait for a runner. Knows nothing about files, lines or HTTP."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import nats.js.errors
from nats.aio.msg import Msg

from headwater.services.runtime import subjects
from headwater.services.runtime.errors import NotFound

from ...buckets import Missing, drop_keys
from ..durable import BATCHES, Durable
from ..work_lease import WorkLease, next_of
from .records import Batch, Kept

_kept = msgspec.json.Decoder(Kept)


class JobName(msgspec.Struct):
    """A message of the queue."""

    tenant: str
    batch_id: str


class Job(WorkLease):
    """A batch that this process runs to its end."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        name = msgspec.json.decode(message.data, type=JobName)
        self.tenant, self.batch_id = name.tenant, name.batch_id


class Ledger:
    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def add(self, kept: Kept) -> None:
        """Queues the batch before it can be found: a message without its batch does no harm."""
        rooms = await self._durable.rooms()
        name = msgspec.json.encode(JobName(kept.tenant, kept.batch.id))
        await rooms.js.publish(subjects.BATCH_JOBS, name)
        await rooms.batches.create(_key(kept.tenant, kept.batch.id), msgspec.json.encode(kept))

    async def get(self, tenant: str, batch_id: str) -> Kept:
        """Record of a batch. Raises `NotFound`, also for another tenant's."""
        return (await self._look_up(tenant, batch_id))[0]

    async def all(self, tenant: str) -> list[Batch]:
        """Batches of a tenant, the youngest first."""
        rooms = await self._durable.rooms()
        pattern = f"{subjects.key_of(tenant)}.>"
        found = [_kept.decode(value).batch async for _, value in rooms.batches.all(pattern)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def result_bytes(self, tenant: str, *, without: str) -> list[int]:
        """Bytes of the results of each unfinished batch except one, as its run stored them last."""
        rooms = await self._durable.rooms()
        pattern = f"{subjects.key_of(tenant)}.>"
        found = [_kept.decode(value) async for _, value in rooms.batches.all(pattern)]
        return [kept.result_bytes for kept in found if not kept.batch.is_over and kept.batch.id != without]

    async def change(self, tenant: str, batch_id: str, change: Callable[[Kept], None]) -> Kept:
        """Changes the current record, also while other processes change it. `change` may raise, which leaves the record
        as it is."""
        rooms = await self._durable.rooms()
        while True:
            kept, revision = await self._look_up(tenant, batch_id)
            change(kept)
            try:
                await rooms.batches.update(_key(tenant, batch_id), msgspec.json.encode(kept), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return kept

    async def drop(self, tenant: str, batch_id: str) -> None:
        """Drops a batch. A process that works on it finds that it is gone, and stops."""
        rooms = await self._durable.rooms()
        await drop_keys(rooms.js, BATCHES, _key(tenant, batch_id))

    async def next_job(self) -> Job:
        """Waits for the next batch. Raises what NATS raises."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.jobs, Job)

    async def _look_up(self, tenant: str, batch_id: str) -> tuple[Kept, int]:
        rooms = await self._durable.rooms()
        try:
            value, revision = await rooms.batches.get(_key(tenant, batch_id))
        except (Missing, nats.js.errors.InvalidKeyError):
            raise NotFound("batch", batch_id) from None
        return _kept.decode(value), revision


def _key(tenant: str, batch_id: str) -> str:
    return f"{subjects.key_of(tenant)}.{batch_id}"
