"""Requests that wait for the first replica of their model, and the message that reports them to
supervisors.

Bounded in number and in time, and fair to tenants. Knows nothing about how replicas are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping

from headwater.proto import events_pb2
from headwater.proto.events_pb2 import CatalogueEntry
from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.served_model import model_key
from headwater.services.runtime.tasks import owned_task, set_within

from ..stages.catalogues import AWAITED, Catalogues
from ..tenancy.tenants import Tenant
from .admission import Admission
from .waiting_tenants import WaitingTenants

TELL_SECONDS = 0.5
"""Seconds between two messages while requests wait."""
PAUSE_SECONDS = 0.02
"""Least number of seconds between two messages, however many requests come and go."""
RETRY_SECONDS = 5.0
"""Seconds after which a client whose wait ran out should try again."""
TEXT = "text"
REPLICA = "replica"
"""Words for the stages that requests wait for: text stages, an engine."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience` is in seconds; 0: no supervisor starts replicas, so no request waits.
        `is_served` tells whether the text stages of a model, by name, are there; `has_replica`
        whether an engine is."""
        self.patience = patience
        self._bus = bus
        self._gateway_id = gateway_id
        self._catalogues = catalogues
        self._is_served = is_served
        self._has_replica = has_replica
        self._queue = Admission(
            sys.maxsize,
            max_waiting,
            has_room=lambda key, *_: self._is_over(*key.split(" ", 1)),
            clock=clock,
        )
        """The requests that no replica was chosen for. Their turns come all at once, in the order
        of the queue."""
        self._waiting = WaitingTenants(clock)
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        self._end: errors.HeadwaterError | None = None
        catalogues.on_change = self.look_again

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ColdStartQueue]:
        """Publishes to the bus inside the `with` block."""
        async with owned_task(self._publish()):
            yield self

    @property
    def waiting(self) -> Mapping[str, int]:
        """Number of waiting requests, by model."""
        return self._waiting.counts

    def wait_seconds(self, model: str) -> float:
        """Seconds until an engine of the model is awake, as its supervisors estimate them; 0 where
        models do not take turns."""
        return min((entry.wait_seconds for entry in self._catalogues.entries(model)), default=0.0)

    def is_cold(self, model: str) -> bool:
        """Whether a request for the model has to wait for a replica."""
        return self.patience > 0 and not self._has_replica(model)

    async def text_stages(self, model: str, *, tenant: Tenant, tier: int) -> None:
        """Waits for the text stages of a model while a supervisor starts them, first come first
        served: what a prompt costs is not known yet. Returns at once where they serve the model, or
        no supervisor knows it. Raises `NotFound` for a model that is being unloaded, else as
        `replica`."""
        if not (entries := self._catalogues.entries(model)):
            return
        states = {entry.state for entry in entries}
        if states == {CatalogueEntry.STATE_UNLOADING}:
            raise errors.NotFound("model", model)
        if self.patience and not self._is_there(TEXT, model) and not states.isdisjoint(AWAITED):
            async with self._waits(model, tenant, self.patience):
                await self._turn(TEXT, model, tenant.key, tier, 0.0)

    async def replica(self, model: str, *, tenant: Tenant, tier: int, virtual_time: float) -> None:
        """Returns when the model has an engine that is awake, or at once if no supervisor would
        start one. Waiting requests continue in the order of tier, virtual time and arrival. Raises
        `Unavailable` if no engine came in time or none can start, at once where models take turns
        and the estimate is that none will be awake in time, and `LimitExceeded` if too many
        requests wait and no other tenant has more of them, or if this request has to make room."""
        if self.is_cold(model):
            if (seconds := self.wait_seconds(model)) > self.patience:
                raise errors.Unavailable(
                    f"the model {model!r} sleeps, and will be awake in about {seconds:.0f} s; "
                    f"requests wait for at most {self.patience:g} s",
                    retry_after=seconds,
                    code="asleep",
                )
            async with self._waits(model, tenant, self.patience):
                await self._turn(REPLICA, model, tenant.key, tier, virtual_time)

    async def replica_of_admitted(self, model: str, tenant: Tenant, least_seconds: float) -> None:
        """Waits as `replica` does, for a request that has its turn: however many wait already, and
        for `least_seconds` at least."""
        if self.is_cold(model):
            async with self._waits(model, tenant, max(self.patience, least_seconds)):
                while not self._has_replica(model):
                    self._check(model)
                    await self._changed.wait()

    def look_again(self) -> None:
        """Wakes the waiting requests, since the state that they wait for has changed."""
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()
        self._queue.give()

    def end(self, error: errors.HeadwaterError) -> None:
        """Ends all waiting by `error`."""
        self._end = error
        self.look_again()

    @contextlib.asynccontextmanager
    async def _waits(self, model: str, tenant: Tenant, seconds: float) -> AsyncIterator[None]:
        """Context of a wait, which is counted and ends after `seconds`. Raises `Unavailable`
        then."""
        number = self._waiting.add(model, tenant.key, tenant.weight)
        self._news.set()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise errors.Unavailable(
                f"no replica of the model {model!r} was there within {seconds:g} s",
                retry_after=self.wait_seconds(model) or RETRY_SECONDS,
                code="no_replica",
            ) from None
        finally:
            self._waiting.remove(model, number)
            self._news.set()

    async def _turn(
        self, what: str, model: str, tenant: str, tier: int, virtual_time: float
    ) -> None:
        """Waits in the queue until what is awaited is there. Raises as `replica`."""
        while True:
            self._check(model)
            turn = await self._queue.take(tier, virtual_time, f"{what} {model}", tenant)
            turn.release()
            if self._is_there(what, model):
                return
            # The engine has left again, or the obstacle that kept this request from starting is
            # gone. The other requests with a turn see this first.
            await asyncio.sleep(0)

    def _is_there(self, what: str, model: str) -> bool:
        if what == REPLICA:
            return self._has_replica(model)
        return self._is_served(model) or not self._catalogues.entries(model)

    def _is_over(self, what: str, model: str) -> bool:
        """Whether requests need not wait longer: what they wait for is there, or will not come."""
        return (
            self._is_there(what, model) or self._end is not None or self._problem(model) is not None
        )

    def _check(self, model: str) -> None:
        """Raises what ended all waiting, and `Unavailable` where each of the model's supervisors
        has a problem."""
        if self._end is not None:
            raise self._end
        if (entry := self._problem(model)) is not None:
            raise errors.Unavailable(
                f"no replica of the model {model!r} can start: {entry.problem}",
                retry_after=entry.retry_seconds,
                code="no_replica",
            )

    def _problem(self, model: str) -> CatalogueEntry | None:
        """Entry of the supervisor that will try again first, where each of the model's supervisors
        has a problem."""
        entries = self._catalogues.entries(model)
        if not entries or not all(entry.problem for entry in entries):
            return None
        return min(entries, key=lambda each: each.retry_seconds)

    async def _publish(self) -> None:
        """Publishes the counts. The last message of a model says that no request waits."""
        while True:
            if not self._waiting.models:
                await self._news.wait()
            self._news.clear()
            for model in self._waiting.models:
                word = events_pb2.Demand(
                    gateway_id=self._gateway_id,
                    model=model,
                    num_waiting=self._waiting.counts.get(model, 0),
                    tenants=self._waiting.tenants_of(model),
                )
                await self._bus.publish(subjects.demand(model_key(model)), word.SerializeToString())
                self._waiting.forget_if_empty(model)
            await asyncio.sleep(PAUSE_SECONDS)
            await set_within(self._news, TELL_SECONDS)
