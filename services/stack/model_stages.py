"""One model on this machine: its text stages, and as many replicas as are wanted. Never decides how
many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headwater.proto.events_pb2 import CatalogueEntry

from .embedded import EmbeddedServerError
from .plan import StackPlan
from .roles import Role
from .scaling import Scaler, ScaleRules
from .stage_process import KeptStage, StageDied

RETIRE_SECONDS = 45.0
"""Longer than an engine's own drain limit, in which it finishes or hands over what runs."""
ENGINE_MODULE = "headwater.services.engine"
PROCESSOR_MODULE = "headwater.services.processor"
PAUSES = (5.0, 15.0, 30.0, 60.0)
"""Seconds until the next try after the first, second … replica that did not start."""


class State(Enum):
    LOADING = "loading"
    SERVING = "serving"
    UNLOADING = "unloading"
    FAILED = "failed"


STATE_TO_PB = {
    State.LOADING: CatalogueEntry.STATE_LOADING,
    State.SERVING: CatalogueEntry.STATE_SERVING,
    State.UNLOADING: CatalogueEntry.STATE_UNLOADING,
}


class StageMaker(Protocol):
    """Makes a stage and does not start it."""

    def __call__(
        self,
        name: str,
        module: str,
        flags: Callable[[], list[str]],
        env: dict[str, str] | None = None,
    ) -> KeptStage: ...


@dataclass(slots=True, kw_only=True, eq=False)
class ModelStages:
    """`name` is what clients ask for."""

    name: str
    rules: ScaleRules
    scaler: Scaler
    make_stage: StageMaker
    taken_places: set[int]
    """Numbers of the machine's GPUs and cores that are taken, shared by all models."""
    state: State = State.LOADING
    plan: StackPlan | None = None
    """Plan of the model's stages; None until its folder is known."""
    progress: tuple[str, int, int] | None = None
    """Progress of the load: what is done, how much of it, and the total."""
    weights: str = ""
    """Revision of the weights that took the place of the model's own; empty: these."""
    is_replacing: bool = False
    """Whether engines load other weights, or begin to compute with them."""
    weights_problem: str = ""
    """Why weights did not take their place, the last time."""
    problem: str = ""
    """Why it could not be loaded, or why its last replica did not start."""
    retry_at: float = 0.0
    processors: list[KeptStage] = field(default_factory=list)
    output_processors: list[KeptStage] = field(default_factory=list)
    engines: dict[int, KeptStage] = field(default_factory=dict)
    """Engines by number, without those that are leaving."""
    leaving: dict[int, KeptStage] = field(default_factory=dict)
    started_with: dict[int, Path | None] = field(default_factory=dict)
    """Folder of weights with which the last life of each replica began; None: the model's own."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """Number of steps of each replica when it was last looked at."""
    task: asyncio.Task[None] | None = None
    """Loads or unloads it."""
    _places: dict[int, int] = field(default_factory=dict)
    _starting: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    """Starts of replicas until they are ready, by number."""
    _num_failures: int = 0

    def stages(self) -> list[KeptStage]:
        return [
            *self.engines.values(),
            *self.leaving.values(),
            *self.processors,
            *self.output_processors,
        ]

    def report(self, what: str, done: int, total: int) -> None:
        self.progress = (what, done, total)

    def make_first_stages(self, plan: StackPlan) -> list[KeptStage]:
        """Makes its text stages and the replicas that it always has."""
        self.plan = plan
        settings = plan.settings

        def text_stages(role: Role, flags: Callable[[int], list[str]], num: int) -> list[KeptStage]:
            module = f"headwater.services.{role.value.replace('-', '_')}"
            env = plan.servers.env(role)
            names = (f"{plan.prefix}{role.value}-{i}" for i in range(num))
            return [
                self.make_stage(name, module, partial(flags, i), env)
                for i, name in enumerate(names)
            ]

        processors = settings.processors
        output_processors = settings.output_processors
        self.processors = text_stages(Role.PROCESSOR, plan.processor, processors)
        self.output_processors = text_stages(
            Role.OUTPUT_PROCESSOR, plan.output_processor, output_processors
        )
        for _ in range(self.rules.min_replicas):
            self.make_engine()
        return self.stages()

    def make_engine(self) -> tuple[int, KeptStage]:
        """The next replica, not started yet, under the lowest number that no other has."""
        assert self.plan is not None
        number = _lowest_free({*self.engines, *self.leaving})
        place = _lowest_free(self.taken_places)
        self.taken_places.add(place)
        name = f"{self.plan.prefix}engine-{number}"
        stage = self.make_stage(
            name, ENGINE_MODULE, partial(self._engine_flags, number), self.plan.engine_env(place)
        )
        self.engines[number] = stage
        self._places[number] = place
        return number, stage

    def _engine_flags(self, number: int) -> list[str]:
        """Flags of an engine whenever it starts: its weights may have been replaced since."""
        assert self.plan is not None
        self.started_with[number] = self.plan.weights_folder
        return self.plan.engine(number)

    async def start_engine(self, tasks: asyncio.TaskGroup, now: Callable[[], float]) -> None:
        """One more replica; one that cannot start is the model's `problem` for a while."""
        number, stage = self.make_engine()
        task = asyncio.current_task()
        assert task is not None
        self._starting[number] = task
        try:
            await stage.begin()
        except (StageDied, EmbeddedServerError, OSError) as fault:
            self.forget_engine(number)
            self.problem = str(fault)
            self.retry_at = now() + PAUSES[min(self._num_failures, len(PAUSES) - 1)]
            self._num_failures += 1
            await stage.release()
        else:
            self._num_failures = 0
            self.problem = ""
            stage.guard(tasks)
        finally:
            self._starting.pop(number, None)

    async def retire_engine(self, number: int, hurry: asyncio.Event) -> KeptStage | None:
        """Retires a replica: it leaves membership and index, completes or hands over its requests,
        and ends, also where an earlier call retires it or was cancelled. Returns it; None where it
        had ended before, or another call returns it."""
        if (stage := self.engines.pop(number, None) or self.leaving.get(number)) is None:
            return None
        self.leaving[number] = stage
        if (starting := self._starting.get(number)) is not None:
            # The death of this process, or its late readiness, no longer matters.
            if not starting.cancelling():
                starting.cancel()
            await asyncio.wait((starting,))
        await stage.stop(RETIRE_SECONDS, hurry)
        if self.leaving.get(number) is not stage:
            return None
        self.forget_engine(number)
        return stage

    def forget_engine(self, number: int) -> None:
        self.engines.pop(number, None)
        self.leaving.pop(number, None)
        self.started_with.pop(number, None)
        self.taken_places.discard(self._places.pop(number))

    def replica_id(self, number: int) -> str:
        assert self.plan is not None
        return self.plan.replica_id("engine", number)

    def is_waiting_to_retry(self, now: float) -> bool:
        """A replica failed a moment ago."""
        if self.problem and self.state is State.SERVING and now >= self.retry_at:
            self.problem = ""
        return bool(self.problem)

    def entry(self, now: float, **turn: Any) -> CatalogueEntry | None:
        """The model's entry in the catalogue for gateways; None for a model that failed. `turn`:
        fields about its turn on the device, where models take turns."""
        if self.state is State.FAILED:
            return None
        retry = max(1.0, self.retry_at - now) if self.problem else 0.0
        return CatalogueEntry(
            model=self.name,
            state=STATE_TO_PB[self.state],
            problem=self.problem,
            retry_seconds=retry,
            **turn,
        )

    def card(self) -> Mapping[str, Any]:
        """The model's card for people: state, replicas, bounds, progress, problem."""
        what, done, total = self.progress or ("", 0, 0)
        return {
            "id": self.name,
            "state": self.state.value,
            "replicas": sum(bool(stage.addresses) for stage in self.engines.values()),
            "starting": sum(not stage.addresses for stage in self.engines.values()),
            "min_replicas": self.rules.min_replicas,
            "max_replicas": self.rules.max_replicas,
            "progress": {"what": what, "done": done, "total": total} if what else None,
            "problem": self.problem,
            "weights": {
                "revision": self.weights or None,
                "is_replacing": self.is_replacing,
                "problem": self.weights_problem,
            },
        }


def prefix_of(name: str, taken: set[str]) -> str:
    """Prefix of the names of a model's stages: readable, fit for a file's name, and not in
    `taken`."""
    word = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"
    numbered = [f"{word}-", *(f"{word}.{i}-" for i in range(2, len(taken) + 3))]
    return next(prefix for prefix in numbered if prefix not in taken)


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(len(taken) + 1) if number not in taken)
