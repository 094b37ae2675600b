"""Divides the storage of NATS JetStream among streams, so that a full stream leaves room for the
others.

Tenants, keys, usage and the audit log have room of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import nats.js.errors
import structlog
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.tasks import owned_task
from headwater.services.runtime.usage_log import AUDIT_STREAM, STREAM

from ..adapters.catalogue import BUCKET as ADAPTERS
from ..adapters.contents import CONTENTS as ADAPTER_CONTENTS
from ..buckets import FAILURES
from ..storage_limits import MIN_STORAGE_BYTES
from ..tenancy.tenant_store import BUCKET
from .durable import (
    BACKGROUND,
    BACKGROUND_LOG,
    BACKGROUND_QUEUE,
    BATCH_QUEUE,
    BATCHES,
    CONTENTS,
    FILES,
    LINES_QUEUE,
    RESULTS,
)
from .storage_fill import StorageFill

PERCENT = {
    f"OBJ_{CONTENTS}": 31,
    f"KV_{RESULTS}": 12,
    f"KV_{BACKGROUND}": 8,
    BACKGROUND_LOG: 4,
    f"OBJ_{ADAPTER_CONTENTS}": 8,
    f"KV_{ADAPTERS}": 1,
    f"KV_{FILES}": 4,
    f"KV_{BATCHES}": 4,
    LINES_QUEUE: 2,
    BATCH_QUEUE: 1,
    BACKGROUND_QUEUE: 1,
    f"KV_{BUCKET}": 4,
    AUDIT_STREAM: 4,
    STREAM: 16,
}
"""Shares of all bytes, by stream. The largest is the first: a NATS with less storage refuses that
one."""
OLDEST_GO = (AUDIT_STREAM, STREAM)
"""Streams that delete their oldest records when full; others refuse new ones."""
RETRY_SECONDS = 10.0
_NO_ROOM = 10047
"""JetStream's error number for a bound above the server's free storage."""
Make = Callable[[], Awaitable[object]]


class StorageBounds:
    """Storage bounds of all streams. Use within `running`. `make` makes the streams that are
    missing."""

    def __init__(self, bus: Bus, num_bytes: int, make: Make, *, num_replicas: int = 1) -> None:
        self._bus = bus
        self._num_bytes = num_bytes
        self._make = make
        self._num_replicas = num_replicas
        self._connected = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StorageBounds]:
        """Sets the bounds whenever NATS is reachable again: it may be another one, or empty."""
        self._bus.on_connected(self._connected.set)
        if self._bus.connected:
            self._connected.set()
        fill = StorageFill(self._bus, PERCENT.keys() - set(OLDEST_GO))
        async with owned_task(self._follow()), fill.running():
            yield self

    async def _follow(self) -> None:
        logged = ""
        while True:
            await self._connected.wait()
            self._connected.clear()
            try:
                if (js := self._bus.jetstream()) is not None:
                    await self._make()
                    await set_bounds(js, self._num_bytes, self._num_replicas)
                logged = ""
            except (*FAILURES, Unavailable) as failure:
                # A server does not gain JetStream while it runs: this is logged once.
                if repr(failure) != logged:
                    structlog.get_logger().warning("storage has no bounds yet", error=repr(failure))
                logged = repr(failure)
                await asyncio.sleep(RETRY_SECONDS)
                if self._bus.connected:
                    self._connected.set()


async def set_bounds(js: JetStreamContext, num_bytes: int, num_replicas: int = 1) -> int:
    """Sets the bounds and returns the number of bytes that were divided: those requested, or less
    by as many quarters as the server needs. `num_replicas` above 1: servers that keep each stream.

    Raises what NATS raises, also where it has less than `MIN_STORAGE_BYTES`.
    """
    wanted = num_bytes
    while True:
        try:
            for stream, percent in PERCENT.items():
                await _set_bound(js, stream, num_bytes * percent // 100, num_replicas)
        except nats.js.errors.APIError as refused:
            if refused.err_code != _NO_ROOM or num_bytes * 3 // 4 < MIN_STORAGE_BYTES:
                raise
            num_bytes = num_bytes * 3 // 4
            continue
        if num_bytes < wanted:
            structlog.get_logger().warning(
                "NATS has less room than storage_bytes", wanted=wanted, taken=num_bytes
            )
        return num_bytes


async def _set_bound(js: JetStreamContext, stream: str, num_bytes: int, num_replicas: int) -> None:
    """Sets the bound of a stream. A missing stream, such as the tenants' where no tenants are kept,
    gets none."""
    try:
        config = (await js.stream_info(stream)).config
    except nats.js.errors.NotFoundError:
        return
    discard = DiscardPolicy.OLD if stream in OLDEST_GO else DiscardPolicy.NEW
    replicas = num_replicas if num_replicas > 1 else config.num_replicas
    wanted = (num_bytes, discard, replicas)
    if (config.max_bytes, config.discard, config.num_replicas) != wanted:
        config.max_bytes = num_bytes
        config.discard = discard
        config.num_replicas = replicas
        await js.update_stream(config)
