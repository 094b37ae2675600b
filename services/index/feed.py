"""Feeds a gateway's indexes, one for each model with a column for each replica, from the bus, the
engines and, if necessary, Redis.

A lost event costs hits until it is repaired; no failure here fails a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
from google.protobuf.message import DecodeError

from headwater.proto import events_pb2

from ..runtime import subjects
from ..runtime.bus import Bus, Subscription
from ..runtime.member import Kind, Member
from ..runtime.membership import Change, ChangeKind, Members
from ..runtime.store import Store, StoreUnavailable
from ..runtime.tasks import log_failure, owned_task
from .cpu_share import CpuShare
from .follower import Dial, Follower, engine_at
from .kv_index import MAX_BLOCKS, Column, KvIndex
from .reader import Incarnation, IndexReader

_SNAPSHOTS_AT_A_TIME = 4
_MAX_SHARE = 0.6
"""Share of a core that following events may take where Redis can be read instead."""
_READ_BELIEVED_SECONDS = 1.0
"""Seconds for which an answer from Redis stands for a column that is not synced."""


class IndexFeed:
    """Indexes of one gateway. Use within `running`. `index` is a model's index, which lags behind
    the engines by the travel time of events."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        store: Store,
        *,
        max_blocks: int = MAX_BLOCKS,
        dial: Dial = engine_at,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`max_blocks` is the limit of each model's index; `work_clock` returns the seconds for
        which this thread has had a core."""
        self._store = store
        self._cpu_share = CpuShare(_MAX_SHARE)
        self._bus = bus
        self._members = members
        self._max_blocks = max_blocks
        self._dial = dial
        self._clock = clock
        self._wall_clock = wall_clock
        self._work_clock = work_clock
        self._reader = IndexReader(store, clock=clock)
        self._indexes: dict[str, KvIndex] = {}
        self._followers: dict[str, tuple[Follower, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self.on_age: Callable[[Incarnation, float], None] = _ignore
        """Called with the replica and the age in seconds of each batch of events on its arrival.
        The age is that by the clocks of two machines: it may be off by any amount, and negative."""
        self._snapshots = asyncio.Semaphore(_SNAPSHOTS_AT_A_TIME)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[IndexFeed]:
        """Follows every engine that is a member, inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.EVERY_KV_EVENT) as batches,
            owned_task(self._read(batches)),
        ):
            self._members.on_change(self._on_change)
            self._bus.on_connected(self._on_connected)
            try:
                yield self
            finally:
                self._members.forget_listener(self._on_change)
                for replica_id in list(self._followers):
                    self._stop_following(replica_id)
                await asyncio.gather(*self._ended, return_exceptions=True)

    def index(self, model_key: str) -> KvIndex:
        if model_key not in self._indexes:
            self._indexes[model_key] = KvIndex(self._max_blocks, self._clock)
        return self._indexes[model_key]

    @property
    def is_read_through(self) -> bool:
        """Whether events are ignored and Redis is read instead."""
        return self._cpu_share.is_resting

    @property
    def columns(self) -> list[Column]:
        """Columns of every model: the known contents of each replica's cache."""
        return [column for index in self._indexes.values() for column in index.columns]

    def is_synced(self, member: Member) -> bool:
        """Whether the index has all events that the engine has published."""
        return self.index(member.model_key).is_synced(member.replica_id, member.epoch)

    def is_sure(self, model_key: str) -> bool:
        """Whether every replica's column is synced, so that Redis knows nothing more."""
        index = self.index(model_key)
        return all(
            index.is_synced(each.replica_id, each.epoch)
            for each in self._members.of(Kind.ENGINE, model_key)
        )

    async def consult(self, model_key: str, hashes: Sequence[bytes]) -> None:
        """Reads this chain in Redis for columns that are not synced, for a few milliseconds at
        most."""
        models = [each.model for each in self._unsure(model_key).values() if each.model is not None]
        if not models:
            return
        try:
            matched = await self._reader.matched(models[0], hashes)
        except StoreUnavailable as failure:
            structlog.get_logger().debug("index not read", reason=str(failure))
            return
        # Looked up again: adding an engine that has left meanwhile would create a column that is
        # never removed.
        known = self.index(model_key).lookup(hashes)
        unsure = self._unsure(model_key)
        for (replica_id, epoch), length in matched.items():
            if (replica_id, epoch) in unsure and length > known.get(replica_id, 0):
                self.expect(unsure[replica_id, epoch], hashes[:length], _READ_BELIEVED_SECONDS)

    def _unsure(self, model_key: str) -> dict[Incarnation, Member]:
        """Replicas whose columns are not synced."""
        replicas = self._members.of(Kind.ENGINE, model_key)
        return {
            (each.replica_id, each.epoch): each for each in replicas if not self.is_synced(each)
        }

    def expect(
        self, member: Member, hashes: Sequence[bytes], seconds: float, start: int = 0
    ) -> None:
        """Assumes for `seconds` that the replica caches this chain, or is about to, from `start`
        on. For a replica that is not followed this is all that is known."""
        index = self.index(member.model_key)
        if index.column(member.replica_id) is None:
            column = index.open(member.replica_id, member.epoch, member.blocks_seen)
            column.is_synced = False
            index.publish(column, 0)
        index.expect(member.replica_id, hashes, seconds, start)

    def doubt(self, member: Member) -> None:
        """Compares the index with the engine's cache, soon and not too often: hits of the replica
        do not come true."""
        if (followed := self._followers.get(member.replica_id)) is not None:
            followed[0].doubt()

    async def _read(self, batches: Subscription) -> None:
        num_dropped = 0
        async for message in batches:
            is_late = batches.num_dropped > num_dropped
            num_dropped = batches.num_dropped
            if self._cpu_share.is_resting and not self._follows_again():
                continue
            started = self._work_clock()
            try:
                batch = events_pb2.KvEventBatch.FromString(message.payload)
            except DecodeError as fault:
                structlog.get_logger().warning(
                    "batch not understood", subject=message.subject, error=str(fault)
                )
                continue
            replica_id = batch.incarnation.replica_id
            self.on_age(
                (replica_id, batch.incarnation.epoch), self._wall_clock() - batch.published_at
            )
            followed = self._followers.get(replica_id)
            if followed is not None:
                followed[0].take(batch)
            is_too_much = self._cpu_share.add(
                self._work_clock() - started, self._clock(), is_late=is_late
            )
            if is_too_much and not self._store.broken:
                self._read_through()

    def _read_through(self) -> None:
        """Ignores events, which take too much of this core, and reads Redis for each prompt for a
        while. Nobody is followed meanwhile: a column that a snapshot fills now would miss all
        events from then on."""
        structlog.get_logger().warning(
            "events are passed over, the index is read through", replicas=len(self._followers)
        )
        self._cpu_share.rest(self._clock())
        for member in self._members.of(Kind.ENGINE):
            self._unfollow(member)

    def _follows_again(self) -> bool:
        if not self._cpu_share.try_again(self._clock()):
            return False
        for member in self._members.of(Kind.ENGINE):
            self._follow(member)
        return True

    def _on_connected(self) -> None:
        """Makes every follower catch up: events that were published while the bus was away are
        lost."""
        for follower, _ in self._followers.values():
            follower.catch_up()

    def _on_change(self, change: Change) -> None:
        member = change.member
        if member.kind is not Kind.ENGINE:
            return
        if change.kind is ChangeKind.LEFT:
            self._unfollow(member)
        elif change.kind is ChangeKind.JOINED and not self._cpu_share.is_resting:
            self._follow(member)
        elif change.kind is ChangeKind.UPDATED:
            # While the bus is away no message of an engine ends a rest.
            self._follows_again()
            if (
                member.load is not None
                and (followed := self._followers.get(member.replica_id)) is not None
            ):
                followed[0].compare(member.load.kv_seq)

    def _follow(self, member: Member) -> None:
        index = self.index(member.model_key)
        follower = Follower(
            self._bus, index, member, self._snapshots, dial=self._dial, clock=self._clock
        )
        task = asyncio.create_task(follower.run())
        task.add_done_callback(log_failure)
        self._followers[member.replica_id] = follower, task

    def _unfollow(self, member: Member) -> None:
        """Stops following an engine, and forgets what it caches."""
        self._stop_following(member.replica_id)
        self.index(member.model_key).forget(member.replica_id)

    def _stop_following(self, replica_id: str) -> None:
        if (followed := self._followers.pop(replica_id, None)) is not None:
            _, task = followed
            task.cancel()
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)


def _ignore(incarnation: Incarnation, age: float) -> None:
    pass
