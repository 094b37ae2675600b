"""The models that supervisors announce, with their states and the problems for which a replica
cannot start.

Knows nothing about requests. Without a supervisor it is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from headwater.proto.events_pb2 import Catalogue, CatalogueEntry
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.tasks import owned_task

EXPIRY_SECONDS = 4.0
"""Seconds of silence after which a supervisor is gone."""
SETTLE_SECONDS = 1.5
"""Seconds in which each supervisor publishes at least once."""
AWAITED = (CatalogueEntry.STATE_LOADING, CatalogueEntry.STATE_SERVING)
"""States of a model for which a request waits."""


@dataclass(frozen=True, slots=True)
class _Received:
    entries: dict[str, CatalogueEntry]
    at: float


class Catalogues:
    """Catalogues of the supervisors on the bus. Use within `running`."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._bus = bus
        self._clock = clock
        self._received: dict[str, _Received] = {}
        self._has_changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Catalogues]:
        """Listens inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.EVERY_CATALOGUE) as words,
            owned_task(self._read(words)),
        ):
            await self._bus.publish(subjects.HELLO, b"")
            yield self

    def supervisors(self) -> list[str]:
        """Names of the supervisors that are there, in order."""
        since = self._clock() - EXPIRY_SECONDS
        return sorted(name for name, received in self._received.items() if received.at > since)

    async def settled(self) -> None:
        """Returns when a supervisor is there, or would have published by now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.supervisors() else SETTLE_SECONDS):
                while not self.supervisors():
                    await self._has_changed.wait()
                    self._has_changed.clear()

    def owners(self, model: str) -> list[str]:
        """Names of the supervisors that serve a model."""
        return [name for name in self.supervisors() if model in self._received[name].entries]

    def entries(self, model: str) -> list[CatalogueEntry]:
        """Entries of a model; empty where no supervisor knows it."""
        if not self._received:
            return []
        return [self._received[name].entries[model] for name in self.owners(model)]

    def is_served(self) -> bool:
        """Whether a supervisor serves a model: it starts or wakes engines when requests wait."""
        return any(
            entry.state == CatalogueEntry.STATE_SERVING
            for name in self.supervisors()
            for entry in self._received[name].entries.values()
        )

    def turn_of(self, model: str) -> dict[str, Any]:
        """Facts about a model's turn on its device, for tenants; empty where models take none. When
        the model was last used is not among them: others may have used it."""
        entry = next((each for each in self.entries(model) if each.turn), None)
        if entry is None:
            return {}
        return {
            "turn": {
                "state": entry.turn,
                "wait_seconds": entry.wait_seconds,
                "num_bytes": entry.num_bytes,
                "is_pinned": entry.is_pinned,
            }
        }

    def on_catalogue(self, catalogue: Catalogue) -> None:
        if catalogue.leaving:
            self._received.pop(catalogue.supervisor_id, None)
        else:
            entries = {entry.model: entry for entry in catalogue.models}
            self._received[catalogue.supervisor_id] = _Received(entries, self._clock())
        self._has_changed.set()
        self.on_change()

    async def _read(self, words: Subscription) -> None:
        async for _, catalogue in words.decoded(Catalogue.FromString, "catalogue"):
            self.on_catalogue(catalogue)
