"""Keeps one engine's column of a gateway's index true: batches as they come, replay or snapshot for
missing ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import structlog

from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2

from ..runtime.bus import Bus
from ..runtime.channel import open_channel
from ..runtime.member import Member
from ..runtime.tasks import set_within
from .kv_index import KvIndex, Verdict

_CALL_SECONDS = 30.0
_POLL_SECONDS = 1.0
"""Seconds between replays while no bus brings events."""
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 2.0
_REPAIR_SECONDS = 30.0
"""Seconds between two snapshots that a checksum requires: a replica that keeps disagreeing must not
be asked for ever."""
_JITTER_SECONDS = 1.0
"""Largest delay in seconds: gateways that doubt a replica at the same time do not ask it at the
same time."""
_MAX_HELD = 4096

Dial = Callable[[str], AbstractAsyncContextManager[Any]]
"""Scope with a stub of the engine at an address."""


@contextlib.asynccontextmanager
async def engine_at(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield engine_pb2_grpc.EngineStub(channel)


class Follower:
    """Follower of one engine. `take` is called with each batch; `run` is a task for as long as the
    engine's incarnation is a member."""

    def __init__(
        self,
        bus: Bus,
        index: KvIndex,
        member: Member,
        snapshots: asyncio.Semaphore,
        *,
        dial: Dial = engine_at,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`snapshots` limits how many followers fetch one at a time."""
        self._bus = bus
        self._index = index
        self._member = member
        self._snapshots = snapshots
        self._dial = dial
        self._clock = clock
        self._held: deque[events_pb2.KvEventBatch] = deque(maxlen=_MAX_HELD)
        self._is_catching_up = True
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._repaired_at = self._doubted_at = -math.inf
        self._last_seq = 0

    def take(self, batch: events_pb2.KvEventBatch) -> None:
        """Applies a batch, or holds it until the missing batches before it have arrived."""
        if batch.incarnation.epoch != self._member.epoch:
            return
        if self._is_catching_up:
            self._held.append(batch)
            return
        match self._index.apply(batch):
            case Verdict.GAP:
                self._held.append(batch)
                self.catch_up()
            case Verdict.MISMATCH:
                self._repair()

    def catch_up(self) -> None:
        """Asks the engine for missing batches, if any are missing."""
        self._is_catching_up = True
        self._wanted.set()

    def compare(self, seq: int) -> None:
        """Takes the number of the engine's last batch from its heartbeat. A batch that should have
        come by the next heartbeat was lost, and no later batch may ever show that."""
        column = self._index.column(self._member.replica_id)
        if not self._is_catching_up and column is not None and column.seq < self._last_seq:
            self.catch_up()
        self._last_seq = seq

    def doubt(self) -> None:
        """Asks for lost batches, a little later; checksums then show whether a snapshot is
        needed."""
        column = self._index.column(self._member.replica_id)
        # A synced column can be doubted, also while the call that filled it is still ending.
        if (
            column is None
            or not column.is_synced
            or self._clock() - self._doubted_at < _REPAIR_SECONDS
        ):
            return
        self._doubted_at = self._clock()
        asyncio.get_running_loop().call_later(random.uniform(0, _JITTER_SECONDS), self.catch_up)

    def _repair(self) -> None:
        if self._clock() - self._repaired_at < _REPAIR_SECONDS:
            return
        structlog.get_logger().warning(
            "index disagrees with its replica", replica=self._member.replica_id
        )
        self._repaired_at = self._clock()
        self._index.forget(self._member.replica_id)
        self.catch_up()

    async def run(self) -> None:
        async with self._dial(self._member.address) as engine:
            while True:
                await self._wait_until_wanted()
                # NOTE: it may have been asked for again while the previous one was ending.
                self._is_catching_up = True
                await self._catch_up(engine)
                self._is_catching_up = False
                held = list(self._held)
                self._held.clear()
                for batch in held:
                    self.take(batch)

    async def _wait_until_wanted(self) -> None:
        """Waits until batches are missing. NOTE: without a bus no message reports new batches, so
        the engine is asked now and then."""
        while not self._wanted.is_set():
            await set_within(self._wanted, _POLL_SECONDS)
            if not self._bus.connected:
                self.catch_up()
        self._wanted.clear()

    async def _catch_up(self, engine: Any) -> None:
        """Tries until no batch is missing; the engine may be starting, busy or out of reach."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                if not await self._replay(engine):
                    async with self._snapshots:
                        await self._copy(engine)
                return
            except grpc.aio.AioRpcError as failure:
                structlog.get_logger().debug(
                    "index not synced", replica=self._member.replica_id, code=failure.code().name
                )
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _MAX_RETRY_SECONDS)

    async def _replay(self, engine: Any) -> bool:
        """Replays missing batches; returns whether they could be had and applied."""
        column = self._index.column(self._member.replica_id)
        if column is None or column.epoch != self._member.epoch:
            return False
        request = engine_pb2.KvEventsRequest(epoch=column.epoch, after_seq=column.seq)
        try:
            async for batch in engine.KvEvents(request, timeout=_CALL_SECONDS):
                if self._index.apply(batch) in (Verdict.GAP, Verdict.MISMATCH):
                    return False
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.OUT_OF_RANGE:
                return False
            raise
        column.is_synced = True
        return True

    async def _copy(self, engine: Any) -> None:
        """Fills a new column from a snapshot and swaps it in."""
        column = self._index.open(
            self._member.replica_id, self._member.epoch, self._member.blocks_seen
        )
        is_published = False
        try:
            async for part in engine.KvSnapshot(
                engine_pb2.KvSnapshotRequest(), timeout=_CALL_SECONDS
            ):
                if part.incarnation.epoch != self._member.epoch:
                    # Another incarnation answers at this address; the membership will report it.
                    break
                self._index.fill(column, part.block_hashes)
                if part.last:
                    self._index.publish(column, part.seq)
                    is_published = True
        finally:
            # A published one may be out of the index again: its engine left while the call was
            # ending.
            if not is_published:
                self._index.abandon(column)
