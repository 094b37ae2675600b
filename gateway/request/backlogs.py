"""Publishes the number of tokens that wait here for a model's replicas, and looks for room there
while any wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headwater.proto.events_pb2 import Backlog
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.tasks import owned_task, set_within

from ..router.router import Router
from .admission import Admission

LOOK_SECONDS = 0.025
"""Seconds between two looks for room; busy replicas publish their load as often."""
BEAT_SECONDS = 1.0
"""Seconds between two messages of a gateway without changes."""


class Backlogs:
    """Publisher of a gateway's waiting tokens. Use within `running`."""

    def __init__(self, bus: Bus, router: Router, admission: Admission) -> None:
        self._bus = bus
        self._router = router
        self._admission = admission
        self._published: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Backlogs]:
        async with owned_task(self._run()):
            yield self

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beat_at = 0.0
        while True:
            self._admission.give()
            if loop.time() >= beat_at:
                beat_at = loop.time() + BEAT_SECONDS
                self._published.clear()
            await self._publish()
            await asyncio.sleep(LOOK_SECONDS)
            await set_within(self._admission.someone_waits, beat_at - loop.time())

    async def _publish(self) -> None:
        epoch = self._router.peers.epoch
        for model_key in self._router.model_keys:
            tokens = self._admission.waiting_tokens(model_key)
            if self._published.get(model_key) != tokens:
                self._published[model_key] = tokens
                backlog = Backlog(epoch=epoch, tokens=tokens)
                await self._bus.publish(
                    subjects.backlog(model_key, epoch), backlog.SerializeToString()
                )
