"""Gives each model the replicas that it should have, by what heartbeats of engines and gateways'
messages of demand say."""

from __future__ import annotations

import asyncio
from typing import Any

from headwater.proto import events_pb2

from ..runtime.bus import Subscription
from ..runtime.member import Kind, ReplicaLoad
from ..runtime.membership import Members
from .model_stages import ModelStages
from .model_table import ModelTable
from .model_turns import Demand, demand_of
from .scaling import Sight

DEMAND_SECONDS = 2.0
"""Seconds for which a gateway's report of waiting requests counts."""


class ReplicaScaling:
    """Acts on what `Scaler` says."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._demand: dict[tuple[str, str], tuple[events_pb2.Demand, float]] = {}
        """Waiting requests by model and gateway, and the time of that report."""

    async def follow(self, words: Subscription) -> None:
        async for _, word in words.decoded(events_pb2.Demand.FromString, "demand"):
            if word.model in self._models:
                self._demand[word.model, word.gateway_id] = word, self._models.now()
                self._models.changed.set()

    def scale(self, model: ModelStages, members: Members, tasks: asyncio.TaskGroup) -> None:
        now = self._models.now()
        if model.is_waiting_to_retry(now):
            return
        sight = self.look(model, members, now)
        surplus = len(model.engines) - model.scaler.wanted(sight, now)
        if surplus < 0:
            self._models.report(f"{model.name}: starting {-surplus} more, {_reason(sight)}")
            for _ in range(-surplus):
                tasks.create_task(model.start_engine(tasks, self._models.now)).add_done_callback(
                    lambda _: self._models.changed.set()
                )
        loads = {
            number: member.load
            for number in model.engines
            if (member := self._member(model, number, members))
        }
        for number in sorted(loads, key=lambda each: (_num_requests(loads[each]), -each))[
            : max(0, surplus)
        ]:
            self._models.report(
                f"{model.name}: stopping {model.engines[number].name}, it is not needed"
            )
            tasks.create_task(self._models.retire(model, number))

    def look(self, model: ModelStages, members: Members, now: float) -> Sight:
        loads = [
            (each.replica_id, each.load)
            for number in model.engines
            if (each := self._member(model, number, members)) is not None
        ]
        steps = {replica_id: load.step for replica_id, load in loads if load is not None}
        was_busy = any(
            model.last_steps.get(replica_id, step) != step for replica_id, step in steps.items()
        )
        model.last_steps = steps
        return Sight(
            num_replicas=len(model.engines),
            num_without_replica=self._num_waiting(model.name, now),
            num_requests=sum(_num_requests(load) for _, load in loads),
            was_busy=was_busy,
            is_starting=not all(stage.addresses for stage in model.engines.values()),
        )

    def _member(self, model: ModelStages, number: int, members: Members) -> Any:
        return members.get(Kind.ENGINE, model.replica_id(number))

    def _num_waiting(self, model: str, now: float) -> int:
        return sum(word.num_waiting for word, _ in self._words(model, now))

    def _words(self, model: str, now: float) -> list[tuple[events_pb2.Demand, float]]:
        """The messages of gateways about a model that are believed, and when they came."""
        return [
            (word, at)
            for (name, _), (word, at) in self._demand.items()
            if name == model and now - at < DEMAND_SECONDS
        ]

    def tenants_waiting(self) -> dict[str, Demand]:
        """Demand of the tenants that wait for a model, by model."""
        now = self._models.now()
        return {each.name: demand_of(self._words(each.name, now)) for each in self._models.all()}


def _num_requests(load: ReplicaLoad | None) -> int:
    return load.num_running + load.num_waiting if load is not None else 0


def _reason(sight: Sight) -> str:
    if sight.num_without_replica:
        return f"{sight.num_without_replica} waiting"
    return f"{sight.num_requests} requests on {sight.num_replicas}"
