"""Bytes in the streams of NATS beside their bounds: a full stream refuses writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable

import nats.js.errors
import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.tasks import owned_task

from ..buckets import FAILURES

LOOK_SECONDS = 15.0


class StorageFill(Collector):
    """Use within `running`. A NATS that cannot be reached leaves no figures: they would be old."""

    def __init__(self, bus: Bus, streams: Collection[str]) -> None:
        self._bus = bus
        self._streams = streams
        self._seen: dict[str, tuple[int, int]] = {}
        """Bytes that a stream has and may have, by its name."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StorageFill]:
        prometheus_client.REGISTRY.register(self)
        try:
            async with owned_task(self._look()):
                yield self
        finally:
            prometheus_client.REGISTRY.unregister(self)

    def collect(self) -> Iterable[Metric]:
        used = GaugeMetricFamily(
            "headwater_stream_used_bytes", "Bytes in a stream of NATS", labels=["stream"]
        )
        most = GaugeMetricFamily(
            "headwater_stream_max_bytes", "Bytes that it may have", labels=["stream"]
        )
        for stream, (num_bytes, bound) in self._seen.items():
            used.add_metric([stream], num_bytes)
            most.add_metric([stream], bound)
        yield from (used, most)

    async def _look(self) -> None:
        while True:
            self._seen = await self._fills()
            await asyncio.sleep(LOOK_SECONDS)

    async def _fills(self) -> dict[str, tuple[int, int]]:
        """Fills of the streams that are there and have a bound."""
        fills: dict[str, tuple[int, int]] = {}
        js = self._bus.jetstream() if self._bus.connected else None
        if js is None:
            return fills
        for stream in self._streams:
            try:
                info = await js.stream_info(stream)
            except nats.js.errors.NotFoundError:
                continue
            except FAILURES:
                return {}
            if (bound := info.config.max_bytes or 0) > 0:
                fills[stream] = info.state.bytes, bound
        return fills
