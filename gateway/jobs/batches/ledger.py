"""Batches, and the queue of those that wait for a runner. Knows nothing about files, lines or
HTTP."""

from __future__ import annotations

import msgspec
from nats.aio.msg import Msg

from headwater.services.runtime import subjects

from ..durable import Durable
from ..tenant_records import TenantRecords
from ..work_lease import WorkLease, next_of
from .records import Batch, Kept


class JobName(msgspec.Struct):
    """A message of the queue."""

    tenant: str
    batch_id: str


class Job(WorkLease):
    """A batch that this process runs to its end."""

    def __init__(self, message: Msg) -> None:
        super().__init__(message)
        name = msgspec.json.decode(message.data, type=JobName)
        self.tenant = name.tenant
        self.batch_id = name.batch_id


class Ledger(TenantRecords[Kept]):
    """Records by tenant and id. A process that works on a batch which is dropped finds that it is
    gone, and stops."""

    def __init__(self, durable: Durable) -> None:
        super().__init__(
            durable, "batches", "batch", msgspec.json.Decoder(Kept).decode, msgspec.json.encode
        )

    async def add(self, kept: Kept) -> None:
        """Queues the batch before it can be found: a message without its batch does no harm."""
        rooms = await self._durable.rooms()
        name = msgspec.json.encode(JobName(kept.tenant, kept.batch.id))
        await rooms.js.publish(subjects.BATCH_JOBS, name)
        await self.create(kept.tenant, kept.batch.id, kept)

    async def batches(self, tenant: str) -> list[Batch]:
        """Batches of a tenant, the youngest first."""
        found = [kept.batch for kept in await self.all(tenant)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def result_bytes(self, tenant: str, *, without: str) -> list[int]:
        """Bytes of the results of each unfinished batch except one, as its run stored them last."""
        found = await self.all(tenant)
        return [
            kept.result_bytes
            for kept in found
            if not kept.batch.is_over and kept.batch.id != without
        ]

    async def next_job(self) -> Job:
        """Waits for the next batch. Raises what NATS raises."""
        rooms = await self._durable.rooms()
        return await next_of(rooms.jobs, Job)
