"""An engine's side of the prefix index in Redis: follows its KV events and keeps its columns
written and leased.

Redis may be away at the start or at any time; the engine then joins the index later and notices
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import structlog
from redis.exceptions import ResponseError

from headwater.proto import events_pb2

from ..models.entry import register
from ..models.model_refused import ModelRefused
from ..runtime.fault_log import FaultLog
from ..runtime.served_model import ServedModel
from ..runtime.store import STORE_FAILURES, Store, StoreUnavailable
from ..runtime.tasks import owned_task, set_within
from .column import IndexColumn, Owner
from .reaper import Reaper
from .slots import shard_of

WRITE_SECONDS = 0.1
"""Seconds between two writes, at least. Gateways learn changes from the bus and read Redis where
they lack some: a call for each step would cost the engine, Redis and the bus more than it tells."""
_IDLE_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_REFUSED_SECONDS = 2.0
"""Pause after an error other than a store that is away: each attempt to fill a column may take a
slot, which only a lease of a few seconds frees."""
_LEAVE_SECONDS = 1.0


class IndexWriter:
    """Writer of one engine. Use within `running`, and give every batch that is published on the bus
    to `apply`."""

    def __init__(
        self,
        store: Store,
        model: ServedModel,
        owner: Owner,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refusal: str | None = None
        """Error of the model's entry that keeps this engine out of the index; None while there is
        none."""
        self._store = store
        self._clock = clock
        self._model = model
        self._columns = [
            IndexColumn(store, model.key, shard, owner, clock=clock)
            for shard in range(model.num_shards)
        ]
        self._register_at = 0.0
        self._wanted = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[IndexWriter]:
        """Writes for the length of a scope; leaving it leaves the index.

        Raises `ModelRefused` where Redis answers and the model is served differently; without
        Redis, or where it refuses, the scope just begins.
        """
        try:
            await register(self._store, self._model)
        except STORE_FAILURES as failure:
            structlog.get_logger().info("index joined later", reason=str(failure))
        reaper = Reaper(self._store, self._model.key, self._model.num_shards)
        try:
            async with owned_task(self._write_for_ever()), owned_task(reaper.run()):
                yield self
        finally:
            await self._leave()

    def apply(self, batch: events_pb2.KvEventBatch) -> None:
        """Takes a batch of changes; never waits and never fails."""
        if batch.cleared:
            for column in self._columns:
                column.clear()
        for block in batch.removed:
            self._column_with(block).drop(block)
        for chain in batch.stored:
            column = self._column_of(chain)
            for block in chain.block_hashes:
                column.add(block)
        self._wanted.set()

    @property
    def slots(self) -> list[int | None]:
        """Published slot of each shard; None where the engine is not in the index."""
        return [column.slot for column in self._columns]

    def _column_with(self, block: bytes) -> IndexColumn:
        return next(
            (column for column in self._columns if block in column.blocks), self._columns[0]
        )

    def _column_of(self, chain: events_pb2.StoredBlocks) -> IndexColumn:
        if len(self._columns) == 1:
            return self._columns[0]
        if chain.parent_hash:
            return self._column_with(chain.parent_hash)
        return self._columns[shard_of(chain.block_hashes[0], len(self._columns))]

    async def _write_for_ever(self) -> None:
        faults = FaultLog("index not written", STORE_FAILURES)
        while True:
            self._wanted.clear()
            try:
                in_step = await self._write()
                faults.clear()
            except StoreUnavailable as failure:
                # New events do not hurry a store that is away.
                structlog.get_logger().debug("index not written", reason=str(failure))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except Exception as fault:
                faults.add(fault)
                await asyncio.sleep(_REFUSED_SECONDS)
                continue
            await asyncio.sleep(WRITE_SECONDS)
            pause = _IDLE_SECONDS if in_step else _RETRY_SECONDS
            await set_within(self._wanted, pause - WRITE_SECONDS)

    async def _write(self) -> bool:
        """Writes pending changes; returns whether Redis has everything now. Raises
        `STORE_FAILURES`."""
        if self._clock() >= self._register_at:
            await self._register()
        if self.refusal is not None:
            return True
        in_step = True
        refusal = None
        for column in self._columns:
            try:
                in_step &= await column.write()
            except ResponseError as failure:
                # One column that Redis refuses does not keep the others from being written.
                refusal = failure
        if refusal is not None:
            raise refusal
        return in_step

    async def _register(self) -> None:
        try:
            await register(self._store, self._model)
            self.refusal = None
        except ModelRefused as refusal:
            if self.refusal is None:
                structlog.get_logger().error("refused by the index", reason=str(refusal))
            self.refusal = str(refusal)
        self._register_at = self._clock() + _IDLE_SECONDS

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                for column in self._columns:
                    await column.leave()
        except (*STORE_FAILURES, TimeoutError):
            structlog.get_logger().info("index left to the lease")
