"""Requests that wait for the first replica of their model, and the message that reports them to supervisors.

Bounded in number and in time. Knows nothing about how replicas are started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from headwater.proto import events_pb2
from headwater.proto.events_pb2 import CatalogueEntry
from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.served_model import model_key
from headwater.services.runtime.tasks import owned_task, set_within

from .catalogues import AWAITED, Catalogues

TELL_SECONDS = 0.5
"""Seconds between two messages while requests wait."""
PAUSE_SECONDS = 0.02
"""Least number of seconds between two messages, however many requests come and go."""
RETRY_SECONDS = 5.0
"""Seconds after which a client whose wait ran out should try again."""


class ColdStartQueue:
    """Waiting requests of one gateway. Use within `running`, or alone where there is no bus."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        catalogues: Catalogues,
        *,
        patience: float,
        max_waiting: int,
        is_served: Callable[[str], bool],
        has_replica: Callable[[str], bool],
    ) -> None:
        """`patience` is in seconds; 0: no supervisor starts replicas, so no request waits. `is_served` tells whether
        the text stages of a model, by name, are there; `has_replica` whether an engine is."""
        self.patience = patience
        self._bus, self._gateway_id, self._catalogues = bus, gateway_id, catalogues
        self._max_waiting, self._is_served, self._has_replica = max_waiting, is_served, has_replica
        self._waiting: Counter[str] = Counter()
        self._news, self._changed = asyncio.Event(), asyncio.Event()
        self._end: errors.HeadwaterError | None = None
        catalogues.on_change = self.look_again

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ColdStartQueue]:
        """Publishes to the bus for the length of a scope."""
        async with owned_task(self._publish()):
            yield self

    @property
    def waiting(self) -> Mapping[str, int]:
        """Number of waiting requests, by model."""
        return self._waiting

    async def text_stages(self, model: str) -> None:
        """Waits for the text stages of a model while a supervisor starts them. Returns at once where they serve the
        model, or no supervisor knows it. Raises `NotFound` for a model that is being unloaded, else as `replica`."""
        states = {entry.state for entry in self._catalogues.entries(model)}
        if states == {CatalogueEntry.STATE_UNLOADING}:
            raise errors.NotFound("model", model)
        if self.patience and not self._is_served(model) and not states.isdisjoint(AWAITED):
            await self._until(model, lambda: self._is_served(model) or not self._catalogues.entries(model))

    async def replica(self, model: str, least_seconds: float | None = None) -> None:
        """Returns when an engine for the model is there, or at once where no supervisor would start one. A request that
        was admitted waits however many wait already, and for `least_seconds` at least; None: it was not.

        Raises `Unavailable` when none came in time or none can start, `LimitExceeded` when too many wait already.
        """
        if self.patience and not self._has_replica(model):
            await self._until(model, lambda: self._has_replica(model), least_seconds)

    def look_again(self) -> None:
        """Wakes the requests that wait: the state that they wait for has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def end(self, error: errors.HeadwaterError) -> None:
        """Ends all waiting by `error`."""
        self._end = error
        self.look_again()

    async def _until(self, model: str, is_there: Callable[[], bool], least_seconds: float | None = None) -> None:
        patience = max(self.patience, least_seconds or 0.0)
        if least_seconds is None and (num_waiting := self._waiting.total()) >= self._max_waiting:
            raise errors.LimitExceeded(f"{num_waiting} requests are already waiting", retry_after=1.0)
        self._count(model, 1)
        try:
            async with asyncio.timeout(patience):
                while not is_there():
                    self._check(model)
                    await self._changed.wait()
        except TimeoutError:
            raise errors.Unavailable(
                f"no replica of the model {model!r} was there within {patience:g} s",
                retry_after=RETRY_SECONDS,
                code="no_replica",
            ) from None
        finally:
            self._count(model, -1)

    def _check(self, model: str) -> None:
        """Raises what ended all waiting, and `Unavailable` where each of the model's supervisors has a problem."""
        if self._end is not None:
            raise self._end
        entries = self._catalogues.entries(model)
        if not entries or not all(entry.problem for entry in entries):
            return
        entry = min(entries, key=lambda each: each.retry_seconds)
        raise errors.Unavailable(
            f"no replica of the model {model!r} can start: {entry.problem}",
            retry_after=entry.retry_seconds,
            code="no_replica",
        )

    def _count(self, model: str, change: int) -> None:
        self._waiting[model] += change
        self._news.set()

    async def _publish(self) -> None:
        """Publishes the counts. The last message of a model says that no request waits."""
        while True:
            if not self._waiting:
                await self._news.wait()
            self._news.clear()
            for model, num_waiting in list(self._waiting.items()):
                word = events_pb2.Demand(gateway_id=self._gateway_id, model=model, num_waiting=num_waiting)
                await self._bus.publish(subjects.demand(model_key(model)), word.SerializeToString())
                if not self._waiting[model]:
                    del self._waiting[model]
            await asyncio.sleep(PAUSE_SECONDS)
            await set_within(self._news, TELL_SECONDS)
