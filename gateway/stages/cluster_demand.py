"""Requests by model on all gateways of a cluster, which any one of them reports to an autoscaler.

Each gateway publishes its counts to the others; the last message of one that is gone counts for a
few seconds, and as long as the bus is away: a sum that is too small would end engines that others
need.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.tasks import owned_task

BEAT_SECONDS = 0.5
EXPIRY_SECONDS = 3.0
Counts = tuple[int, int]
"""Number of requests that wait or run, and how many of them wait for a first replica."""
ReadDemand = Callable[[], Mapping[str, Counts]]


class _Word(msgspec.Struct):
    """Counts of one gateway, by model."""

    gateway_id: str
    models: dict[str, Counts]


@dataclass(frozen=True, slots=True)
class _Reported:
    models: Mapping[str, Counts]
    at: float


class ClusterDemand:
    """Counts of all gateways. Use within `running`, or alone where there is no bus: then it knows
    only its own gateway."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        read: ReadDemand,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the requests of this gateway by model; a model that it serves has an entry
        without any."""
        self._bus = bus
        self._gateway_id = gateway_id
        self._read = read
        self._clock = clock
        self._others: dict[str, _Reported] = {}
        self._connected_at = -EXPIRY_SECONDS
        bus.on_connected(self._on_connected)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ClusterDemand]:
        """Publishes to and follows the other gateways inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.GATEWAY_DEMAND) as words,
            owned_task(self._publish()),
            owned_task(self._follow(words)),
        ):
            yield self

    def of(self, model: str) -> Counts | None:
        """The sum over all gateways; None where none of them knows the model."""
        found = [models[model] for models in self._known() if model in models]
        return (sum(each[0] for each in found), sum(each[1] for each in found)) if found else None

    def _known(self) -> list[Mapping[str, Counts]]:
        return [
            self._read(),
            *(reported.models for reported in self._others.values() if self._counts(reported)),
        ]

    def _counts(self, reported: _Reported) -> bool:
        """Whether a gateway's last word still does: it was young when the bus was there last, or it
        is."""
        is_away = self._bus.url is not None and not self._bus.connected
        return is_away or max(reported.at, self._connected_at) > self._clock() - EXPIRY_SECONDS

    def _on_connected(self) -> None:
        self._connected_at = self._clock()

    async def _publish(self) -> None:
        """Publishes the counts. Models without requests are left out; a gateway without any reports
        that once."""
        has_published = False
        while True:
            models = {name: counts for name, counts in self._read().items() if any(counts)}
            if models or has_published:
                await self._bus.publish(
                    subjects.GATEWAY_DEMAND, msgspec.msgpack.encode(_Word(self._gateway_id, models))
                )
            has_published = bool(models)
            await asyncio.sleep(BEAT_SECONDS)

    async def _follow(self, words: Subscription) -> None:
        async for message in words:
            with contextlib.suppress(msgspec.DecodeError):
                word = msgspec.msgpack.decode(message.payload, type=_Word)
                if word.gateway_id != self._gateway_id:
                    self._forget_expired()
                    self._others[word.gateway_id] = _Reported(word.models, self._clock())

    def _forget_expired(self) -> None:
        self._others = {
            name: reported for name, reported in self._others.items() if self._counts(reported)
        }
