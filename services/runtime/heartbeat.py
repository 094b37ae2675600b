"""A process's own presence on the bus: a heartbeat each second, one at once for a newcomer, a last
one on leaving."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from . import subjects
from .bus import Bus
from .member import Member
from .tasks import owned_task, set_within

BEAT_SECONDS = 1.0


class Heartbeat:
    """Publishes what `describe` returns.

    async with Heartbeat.running(bus, describe) as heartbeat:
        await life.stopping.wait()
        await heartbeat.leave()
    """

    def __init__(self, bus: Bus, describe: Callable[[], Member]) -> None:
        self._bus = bus
        self._describe = describe
        self._left = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, bus: Bus, describe: Callable[[], Member]) -> AsyncIterator[Heartbeat]:
        """Beats inside the `with` block; leaving the scope leaves the membership."""
        heartbeat = cls(bus, describe)
        reconnected = asyncio.Event()
        bus.on_connected(reconnected.set)
        async with (
            owned_task(heartbeat._beat_each_second(reconnected)),
            owned_task(heartbeat._answer_newcomers()),
        ):
            try:
                yield heartbeat
            finally:
                await heartbeat.leave()

    async def beat(self) -> None:
        """Publishes a heartbeat now, so that a change is seen at once."""
        if not self._left:
            await self._publish(self._describe())

    async def leave(self) -> None:
        """Publishes the last heartbeat."""
        if not self._left:
            self._left = True
            await self._publish(dataclasses.replace(self._describe(), draining=True, leaving=True))

    async def _publish(self, member: Member) -> None:
        subject = subjects.member(member.kind.value, member.replica_id)
        await self._bus.publish(subject, member.to_pb().SerializeToString())

    async def _beat_each_second(self, reconnected: asyncio.Event) -> None:
        while True:
            await self.beat()
            await set_within(reconnected, BEAT_SECONDS)
            reconnected.clear()

    async def _answer_newcomers(self) -> None:
        async with self._bus.subscribe(subjects.HELLO) as hellos:
            async for _ in hellos:
                await self.beat()
