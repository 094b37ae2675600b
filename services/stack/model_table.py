"""The models of a cluster by name, with what their stages share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from .memory_shares import StartedModel
from .model_request import ModelRequest
from .model_stages import ModelStages, StageMaker, State
from .model_weights import ModelWeights
from .plan import StackPlan
from .refused import Refused
from .scaling import Scaler, ScaleRules
from .settings import StackSettings
from .settings_beside import plan_beside

STOP_SECONDS = 10.0


class ModelTable:
    """Models that are loaded, served or unloaded. `changed` is set when a look at them is due."""

    def __init__(
        self,
        settings: StackSettings,
        weights: ModelWeights,
        make_stage: StageMaker,
        *,
        hurry: asyncio.Event,
        report: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.weights = weights
        self.report = report
        self.changed = asyncio.Event()
        self.now = time.monotonic
        self._make_stage = make_stage
        self._hurry = hurry
        self._plan: StackPlan | None = None
        self._models: dict[str, ModelStages] = {}
        self._places: set[int] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    @property
    def plan(self) -> StackPlan:
        """Plan of the model that the cluster starts with."""
        assert self._plan is not None
        return self._plan

    def get(self, name: str) -> ModelStages | None:
        return self._models.get(name)

    def named(self, name: str) -> ModelStages:
        """Raises `Refused` for a name that no model has."""
        if (model := self._models.get(name)) is None:
            raise Refused("model_not_found", f"the model {name!r} does not exist")
        return model

    def served(self, name: str) -> ModelStages:
        """Raises `Refused` for a model that is not served."""
        model = self.named(name)
        if model.state is not State.SERVING:
            raise Refused("model_not_served", f"the model {name!r} is {model.state.value}")
        return model

    def drop(self, model: ModelStages) -> None:
        del self._models[model.name]

    def first(self, plan: StackPlan) -> ModelStages:
        """The model that the cluster starts with. The caller begins its stages and calls `serve`.
        Raises `StackError` where its weights were replaced and cannot be read."""
        self._plan = plan
        model = self.add(plan.served_name, self.settings.rules)
        model.make_first_stages(self.weights.in_force(model, plan))
        return model

    def beside(self, started: StartedModel, **own: Any) -> ModelStages:
        """Another model that the cluster starts with, as `first`. `own`: settings that it has for
        itself."""
        model = self.add(started.name, self.rules_of(ModelRequest(do="load")))
        plan = self.plan_beside(started, **own)
        model.make_first_stages(self.weights.in_force(model, plan))
        return model

    def plan_beside(self, started: StartedModel, /, **own: Any) -> StackPlan:
        return plan_beside(self.plan, self.settings, started, self._prefixes(), **own)

    def _prefixes(self) -> set[str]:
        return {each.plan.prefix for each in self.all() if each.plan is not None}

    def serve(self, model: ModelStages) -> None:
        """Serves the model from when its first stages are ready."""
        model.state = State.SERVING
        model.progress = None
        model.scaler = Scaler(model.rules, self.now())
        self.changed.set()

    def all(self) -> list[ModelStages]:
        return list(self._models.values())

    def add(self, name: str, rules: ScaleRules) -> ModelStages:
        model = ModelStages(
            name=name,
            rules=rules,
            scaler=Scaler(rules, self.now()),
            make_stage=self._make_stage,
            taken_places=self._places,
        )
        self._models[name] = model
        return model

    def rules_of(self, request: ModelRequest) -> ScaleRules:
        """Rules of a model: without a number those of the cluster, or one replica where the
        cluster's is fixed."""
        ours = self.settings.rules
        if request.max_replicas is None and request.min_replicas is None:
            return (
                ours
                if self.settings.scales_by_demand
                else replace(ours, min_replicas=1, max_replicas=1)
            )
        most = (
            request.max_replicas
            if request.max_replicas is not None
            else max(1, request.min_replicas or 0)
        )
        least = (
            request.min_replicas
            if request.min_replicas is not None
            else min(ours.min_replicas, most)
        )
        return replace(ours, min_replicas=least, max_replicas=most)

    async def retire(self, model: ModelStages, number: int) -> None:
        if (stage := await model.retire_engine(number, self._hurry)) is not None:
            self.report(f"{stage.name} has left")

    async def end(self, model: ModelStages) -> None:
        """Ends replicas first, also those that are draining: until they end, their requests need
        the text stages."""
        await asyncio.gather(
            *(self.retire(model, number) for number in [*model.engines, *model.leaving])
        )
        await _all(
            stage.stop(STOP_SECONDS, self._hurry)
            for stage in [*model.processors, *model.output_processors]
        )
        model.processors = []
        model.output_processors = []


async def _all(work: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*work)
