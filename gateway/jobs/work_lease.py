"""Work from a durable queue that is this process's until it is done, given back, or not renewed for
too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from headwater.services.runtime.tasks import owned_task

from ..buckets import FAILURES
from .durable import HOLD_SECONDS

FETCH_SECONDS = 4.0
"""Seconds of one request for work: a server that restarts forgets the request."""
LeaseT = TypeVar("LeaseT", bound="WorkLease")


class WorkLease:
    """Lease of a message's work. Raises `msgspec.MsgspecError` for a message that names no work."""

    def __init__(self, message: Msg) -> None:
        self.num_deliveries = message.metadata.num_delivered
        self._message = message

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keeps other processes from taking the work inside the `with` block."""
        async with owned_task(self._hold()):
            yield

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS / 3)
            # While the server is away no other process gets it either.
            with contextlib.suppress(*FAILURES):
                await self._message.in_progress()

    async def done(self) -> None:
        await self._message.ack_sync()

    async def give_back(self, seconds: float = 0.0) -> None:
        """Gives the work to the next process that asks, after that many seconds. Without a server
        the lease expires."""
        with contextlib.suppress(*FAILURES):
            await self._message.nak(delay=seconds or None)


async def next_of(queue: JetStreamContext.PullSubscription, kind: type[LeaseT]) -> LeaseT:
    """Waits for the next work. A message that names no work known to this version is logged and
    removed. Raises what NATS raises."""
    while True:
        try:
            (message,) = await queue.fetch(1, timeout=FETCH_SECONDS)
        except nats.errors.TimeoutError:
            continue
        try:
            return kind(message)
        except msgspec.MsgspecError as fault:
            structlog.get_logger().error(
                "work not understood", subject=message.subject, error=str(fault)
            )
            await message.term()
