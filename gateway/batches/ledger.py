"""Batches, the queue of those that wait for a runner, and the results of their lines: one a line, whoever computes it.

Knows nothing about files, lines' contents or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from headwater.gateway.batches.durable import FAILURES, HOLD_SECONDS, RESULTS, Durable, Missing, entries, value_of
from headwater.gateway.batches.records import Batch, Kept, Result
from headwater.services import subjects
from headwater.services.errors import NotFound
from headwater.services.runtime import owned_task

FETCH_SECONDS = 4.0
"""Of a question for a job; a server that restarts forgets what it was asked."""
_kept = msgspec.json.Decoder(Kept)
_results = msgspec.json.Decoder(Result)


class JobName(msgspec.Struct):
    """What the queue carries."""

    tenant: str
    batch_id: str


class Job:
    """A batch that this process may work on, until it is `done` or given back."""

    def __init__(self, message: Msg) -> None:
        name = msgspec.json.decode(message.data, type=JobName)
        self.tenant, self.batch_id = name.tenant, name.batch_id
        self.num_deliveries = message.metadata.num_delivered
        self._message = message

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps others from taking it for the length of a scope."""
        async with owned_task(self._hold()):
            yield

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS / 3)
            # While the server is away nobody else gets it either.
            with contextlib.suppress(*FAILURES):
                await self._message.in_progress()

    async def done(self) -> None:
        await self._message.ack_sync()

    async def give_back(self, seconds: float = 0.0) -> None:
        """To whoever is next, not before so many seconds. Out of reach, its time runs out by itself."""
        with contextlib.suppress(*FAILURES):
            await self._message.nak(delay=seconds or None)


class Ledger:
    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    async def add(self, kept: Kept) -> None:
        """Queues it before it is there to be found: one without the other is a job that nobody misses."""
        rooms = await self._durable.rooms()
        name = msgspec.json.encode(JobName(kept.tenant, kept.batch.id))
        await rooms.js.publish(subjects.BATCH_JOBS, name)
        await rooms.batches.create(_key(kept.tenant, kept.batch.id), msgspec.json.encode(kept))

    async def get(self, tenant: str, batch_id: str) -> Kept:
        """Raises `NotFound`, also for another tenant's."""
        return (await self._look_up(tenant, batch_id))[0]

    async def all(self, tenant: str) -> list[Batch]:
        """The youngest first."""
        rooms = await self._durable.rooms()
        pattern = f"{subjects.key_of(tenant)}.>"
        found = [_kept.decode(entry.value or b"").batch async for entry in entries(rooms.batches, pattern)]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def change(self, tenant: str, batch_id: str, change: Callable[[Kept], None]) -> Kept:
        """Changes what is there now, whoever else changes it meanwhile; `change` may raise to leave it be."""
        rooms = await self._durable.rooms()
        while True:
            kept, revision = await self._look_up(tenant, batch_id)
            change(kept)
            try:
                await rooms.batches.update(_key(tenant, batch_id), msgspec.json.encode(kept), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
            return kept

    async def next_job(self) -> Job:
        """Waits for one. Raises what NATS raises."""
        rooms = await self._durable.rooms()
        while True:
            try:
                (message,) = await rooms.jobs.fetch(1, timeout=FETCH_SECONDS)
            except nats.errors.TimeoutError:
                continue
            return Job(message)

    async def keep_result(self, batch_id: str, number: int, result: Result) -> bool:
        """False when the line had one already: the first stands."""
        rooms = await self._durable.rooms()
        try:
            await rooms.results.create(f"{batch_id}.{number}", msgspec.json.encode(result))
        except nats.js.errors.KeyWrongLastSequenceError:
            return False
        return True

    async def results(self, batch_id: str) -> AsyncIterator[tuple[int, bytes, bool]]:
        """(line number, the result as JSON, whether it is a success), in the order in which they came."""
        rooms = await self._durable.rooms()
        async for entry in entries(rooms.results, f"{batch_id}.>"):
            value = entry.value or b""
            yield int(entry.key.rpartition(".")[2]), value, _results.decode(value).is_success

    async def drop_results(self, batch_id: str) -> None:
        rooms = await self._durable.rooms()
        await rooms.js.purge_stream(f"KV_{RESULTS}", subject=f"$KV.{RESULTS}.{batch_id}.>")

    async def _look_up(self, tenant: str, batch_id: str) -> tuple[Kept, int]:
        rooms = await self._durable.rooms()
        try:
            value, revision = await value_of(rooms.batches, _key(tenant, batch_id))
        except (Missing, nats.js.errors.InvalidKeyError):
            raise NotFound("batch", batch_id) from None
        return _kept.decode(value), revision


def _key(tenant: str, batch_id: str) -> str:
    return f"{subjects.key_of(tenant)}.{batch_id}"
