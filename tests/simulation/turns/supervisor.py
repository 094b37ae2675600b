"""The supervisor of a simulated device: the real turns of its models, catalogues and demand.

It starts no process: engines of the simulation come and go by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from headwater.proto import events_pb2
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.tasks import owned_task, set_within
from headwater.services.stack.model_manager import LOOK_SECONDS
from headwater.services.stack.model_stages import ModelStages, State
from headwater.services.stack.model_turns import ModelTurns, demand_of
from headwater.services.stack.replica_scaling import DEMAND_SECONDS
from tests.simulation.turns.device import SimulatedCalls

SUPERVISOR = "supervisor-0"


@dataclass(frozen=True)
class Stages:
    """See `ModelStages`: what turns read of a model."""

    name: str
    engine: str
    state: State = State.SERVING
    engines: Mapping[int, Any] = field(default_factory=lambda: {0: None})

    def replica_id(self, number: int) -> str:
        return self.engine


class SimulatedSupervisor:
    """Use within `running`."""

    def __init__(
        self,
        bus: Bus,
        resident_bytes: int,
        engines: Mapping[str, str],
        calls: SimulatedCalls,
    ) -> None:
        """`engines`: address of the engine of each model."""
        self._bus = bus
        self._clock = asyncio.get_running_loop().time
        self._models = [cast("ModelStages", Stages(*each)) for each in engines.items()]
        self._changed = asyncio.Event()
        self._demand: dict[tuple[str, str], tuple[events_pb2.Demand, float]] = {}
        self.reports: list[str] = []
        self.turns = ModelTurns(
            resident_bytes, self.reports.append, clock=self._clock, engines=calls
        )
        self.turns.on_change = self._changed.set
        self.members = Members(
            bus, (Kind.ENGINE,), {Kind.ENGINE: list(engines.values())}, clock=self._clock
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedSupervisor]:
        async with (
            owned_task(self._own_tasks()),
            self.members.running(),
            self._bus.subscribe(subjects.EVERY_DEMAND) as words,
            self._bus.subscribe(subjects.EVERY_LOAD) as loads,
            owned_task(self.turns.follow(loads)),
            owned_task(self._follow(words)),
            owned_task(self._look()),
            owned_task(self._publish()),
        ):
            yield self

    async def _own_tasks(self) -> None:
        async with asyncio.TaskGroup() as self.tasks:
            await asyncio.Event().wait()

    async def _look(self) -> None:
        while True:
            self.turns.look(self._models, self.members, self._tenants_waiting(), self.tasks)
            await set_within(self._changed, LOOK_SECONDS)
            self._changed.clear()

    def _tenants_waiting(self) -> dict[str, Any]:
        return {each.name: demand_of(self._words(each.name)) for each in self._models}

    def _words(self, model: str) -> Sequence[tuple[events_pb2.Demand, float]]:
        return [
            (word, at)
            for (name, _), (word, at) in self._demand.items()
            if name == model and self._clock() - at < DEMAND_SECONDS
        ]

    async def _follow(self, words: Subscription) -> None:
        async for _, word in words.decoded(events_pb2.Demand.FromString, "demand"):
            self._demand[word.model, word.gateway_id] = word, self._clock()
            self._changed.set()

    async def _publish(self) -> None:
        while True:
            entries = [
                events_pb2.CatalogueEntry(
                    model=each.name,
                    state=events_pb2.CatalogueEntry.STATE_SERVING,
                    **self.turns.entry(each.name),
                )
                for each in self._models
            ]
            catalogue = events_pb2.Catalogue(supervisor_id=SUPERVISOR, models=entries)
            await self._bus.publish(subjects.catalogue(SUPERVISOR), catalogue.SerializeToString())
            await asyncio.sleep(LOOK_SECONDS / 5)
