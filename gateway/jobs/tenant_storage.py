"""Counts the bytes that tenants keep in NATS, and enforces their limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from headwater.services.runtime import subjects
from headwater.services.runtime.errors import LimitExceeded, StorageLimitExceeded

from ..buckets import last_headers
from ..storage_limits import StorageLimits
from .batches.files import Files
from .batches.ledger import Ledger
from .durable import BACKGROUND_LOG, RESULTS, Durable

MAX_BACKGROUND = 1000
"""Largest number of a tenant's background responses, waiting, running or kept in NATS."""
CACHE_SECONDS = 5.0
"""Greatest age of a cached `_OtherStorage`."""
MAX_CACHED_TENANTS = 4096
NUM_BYTES = "Headwater-Bytes"
"""Header of a message of events: number of bytes of that response's events so far, those in the
message included."""


@dataclass(frozen=True, slots=True)
class _OtherStorage:
    """The bytes of a tenant besides its events, as read from NATS."""

    num_bytes: int
    """Number of bytes of files, batches, results and background records."""
    stream_bound: int
    """Bound in bytes of the stream of all tenants' events; 0 or less: none."""
    read_at: float


class TenantStorage:
    """Bytes of files, batches with their results, and background responses with their events, by
    `Tenant.key`.

    There is one for a gateway. Additions of several gateways at the same moment may exceed a limit,
    by one request of each.
    """

    def __init__(
        self,
        durable: Durable,
        limits: StorageLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.durable = durable
        self._limits = limits
        self._clock = clock
        self._files = Files(durable)
        self._batches = Ledger(durable)
        self._adding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._cached: dict[str, _OtherStorage] = {}
        """Values by tenant, in the order in which they were read."""

    @contextlib.asynccontextmanager
    async def room(self, tenant: str, num_bytes: int) -> AsyncIterator[None]:
        """Scope that adds that many bytes. Raises `StorageLimitExceeded`, and what NATS raises."""
        lock = self._adding.setdefault(tenant, asyncio.Lock())
        async with lock:
            kept = await self.of(tenant)
            limit = self._limits.file_bytes(tenant)
            if kept + num_bytes > limit:
                raise StorageLimitExceeded("file_bytes", kept, num_bytes, limit)
            try:
                yield
            finally:
                self._cached.pop(tenant, None)

    @contextlib.asynccontextmanager
    async def room_in_background(
        self, tenant: str, num_bytes: int, *, num_event_bytes: int
    ) -> AsyncIterator[None]:
        """Like `room`, for a background response and its first events. Raises `LimitExceeded` if
        the tenant has too many responses."""
        rooms = await self.durable.rooms()
        if len(await rooms.background.sizes(f"{subjects.key_of(tenant)}.>")) >= MAX_BACKGROUND:
            raise LimitExceeded(
                f"the tenant has {MAX_BACKGROUND} responses in the background", retry_after=60.0
            )
        if num_event_bytes:
            await self.check_events(tenant, num_event_bytes)
        async with self.room(tenant, num_bytes + num_event_bytes):
            yield

    async def check_events(self, tenant: str, num_bytes: int) -> None:
        """Raises `StorageLimitExceeded` where the tenant has no room for so many more bytes of
        events, and what NATS raises. Half of their stream is for others': one that a tenant has
        filled would let no other stream.

        Each background stream calls this every few seconds. Only events are counted at each call;
        the rest is cached.
        """
        events = await self.event_bytes(tenant)
        try:
            self._check_events(tenant, events, num_bytes, await self._cached_other(tenant))
        except StorageLimitExceeded:
            # Files may have been deleted since the cached value was read.
            self._check_events(tenant, events, num_bytes, await self._read_other(tenant))

    def _check_events(self, tenant: str, events: int, num_bytes: int, other: _OtherStorage) -> None:
        kept = other.num_bytes + events
        limit = self._limits.file_bytes(tenant)
        if kept + num_bytes > limit:
            raise StorageLimitExceeded("file_bytes", kept, num_bytes, limit)
        bound = other.stream_bound
        if 0 < bound < 2 * (events + num_bytes):
            raise StorageLimitExceeded(
                "events of streams in the background", events, num_bytes, bound // 2
            )

    async def _cached_other(self, tenant: str) -> _OtherStorage:
        """Bytes besides events, at most `CACHE_SECONDS` old. Concurrent callers wait for one
        reading."""
        lock = self._reading.setdefault(tenant, asyncio.Lock())
        async with lock:
            other = self._cached.get(tenant)
            if other is None or self._clock() - other.read_at > CACHE_SECONDS:
                other = await self._read_other(tenant)
            return other

    async def _read_other(self, tenant: str) -> _OtherStorage:
        rooms = await self.durable.rooms()
        read_at = self._clock()
        bound = (await rooms.js.stream_info(BACKGROUND_LOG)).config.max_bytes or 0
        other = _OtherStorage(await self._other_bytes(tenant), bound, read_at)
        self._cached.pop(tenant, None)
        self._cached[tenant] = other
        if len(self._cached) > MAX_CACHED_TENANTS:
            del self._cached[next(iter(self._cached))]
        return other

    async def event_bytes(self, tenant: str) -> int:
        """Bytes of the streams of background responses, as their writers put in the last message of
        each."""
        rooms = await self.durable.rooms()
        found = last_headers(rooms.js, BACKGROUND_LOG, subjects.background_events(tenant, ">"))
        return sum([_number(headers.get(NUM_BYTES, "")) async for headers in found])

    async def of(self, tenant: str, *, without: str = "") -> int:
        """Number of bytes that a tenant keeps; results of one batch may be left out. Raises what
        NATS raises."""
        return await self._other_bytes(tenant, without=without) + await self.event_bytes(tenant)

    async def _other_bytes(self, tenant: str, *, without: str = "") -> int:
        rooms = await self.durable.rooms()
        pattern = f"{subjects.key_of(tenant)}.>"
        files = sum([file.bytes for file in await self._files.all(tenant)])
        results = sum(await self._batches.result_bytes(tenant, without=without))
        records = [*await rooms.background.sizes(pattern), *await rooms.batches.sizes(pattern)]
        return files + results + sum(records)

    async def left(self, tenant: str, *, without: str) -> int:
        """Number of bytes that the results of one batch may take."""
        of_tenant = self._limits.file_bytes(tenant) - await self.of(tenant, without=without)
        rooms = await self.durable.rooms()
        bound = (await rooms.js.stream_info(f"KV_{RESULTS}")).config.max_bytes or 0
        if bound <= 0:
            return of_tenant
        # The rest is for others': a bucket that one tenant has filled would let no batch end.
        of_bucket = bound // 2 - sum(await self._batches.result_bytes(tenant, without=without))
        return min(of_tenant, of_bucket)


def _number(word: str) -> int:
    """The number in a header, which any process with rights to NATS may have written."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 16 else 0
