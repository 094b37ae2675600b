"""The models of a cluster: loads and unloads them when asked over the bus, gives each the replicas
that it should have.

Acts on what `Scaler` says; what is seen comes from heartbeats of engines and from gateways' words
of demand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from headwater.proto import events_pb2

from ..runtime import subjects
from ..runtime.bus import Bus, Subscription
from ..runtime.member import Kind
from ..runtime.membership import Members
from ..runtime.model_name import PLACE_ALLOWED, is_model_place
from ..runtime.settings import require
from ..runtime.tasks import owned_task, set_within
from .model_loads import ModelLoads
from .model_request import ModelRequest
from .model_stages import ModelStages, StageMaker, State
from .model_table import ModelTable
from .model_turns import ModelTurns
from .model_weights import ModelWeights
from .refused import Refused, refusing
from .replica_scaling import ReplicaScaling
from .settings import StackSettings
from .stage_process import SupervisorPipe

_log = structlog.get_logger()

LOOK_SECONDS = 0.25
BEAT_SECONDS = 1.0


class ModelManager:
    """Use `run`; what it starts, the stages of the models in `table` know."""

    def __init__(
        self,
        settings: StackSettings,
        supervisor: SupervisorPipe,
        make_stage: StageMaker,
        *,
        hurry: asyncio.Event,
        report: Callable[[str], None],
    ) -> None:
        self._weights = ModelWeights(settings.state_dir, supervisor, report)
        self.table = ModelTable(settings, self._weights, make_stage, hurry=hurry, report=report)
        self._scaling = ReplicaScaling(self.table)
        self._loads = ModelLoads(self.table, self._scaling, supervisor)
        self._turns: ModelTurns | None = None
        if settings.resident_bytes:
            self._turns = ModelTurns(settings.resident_bytes, report)
            self._turns.on_change = self.table.changed.set

    async def run(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        """Answers requests, announces models, starts and stops them, until cancelled."""
        for model in self.table.all():
            self._weights.report(model)
            for stage in model.stages():
                stage.guard(tasks)
        self._loads.again(tasks)
        async with (
            Members(bus, [Kind.ENGINE]).running() as members,
            bus.subscribe(subjects.models_control(self.supervisor_id)) as calls,
            bus.subscribe(subjects.EVERY_DEMAND) as words,
            bus.subscribe(subjects.HELLO) as hellos,
            owned_task(self._follow_loads(bus)),
            owned_task(self._answer(bus, calls, members, tasks)),
            owned_task(self._scaling.follow(words)),
            owned_task(self._greet(hellos)),
            owned_task(self._publish(bus)),
        ):
            try:
                await self._scale(bus, members, tasks)
            finally:
                await bus.publish(
                    subjects.catalogue(self.supervisor_id), self._catalogue(leaving=True)
                )

    @property
    def supervisor_id(self) -> str:
        return self.table.plan.supervisor_id

    async def _scale(self, bus: Bus, members: Members, tasks: asyncio.TaskGroup) -> None:
        while True:
            # Without the bus no heartbeats arrive, so the known members stay.
            for model in self.table.all() if bus.connected else ():
                if model.state is State.SERVING:
                    self._scaling.scale(model, members, tasks)
            if self._turns is not None and bus.connected:
                self._turns.look(self.table.all(), members, self._scaling.tenants_waiting(), tasks)
            await set_within(self.table.changed, LOOK_SECONDS)
            self.table.changed.clear()

    async def _follow_loads(self, bus: Bus) -> None:
        """Takes the load messages of engines where models take turns: many a second, which nothing
        else here reads."""
        if self._turns is not None:
            async with bus.subscribe(subjects.EVERY_LOAD) as loads:
                await self._turns.follow(loads)

    async def _greet(self, hellos: Subscription) -> None:
        async for _ in hellos:
            self.table.changed.set()

    async def _publish(self, bus: Bus) -> None:
        """Publishes the catalogue of models each second, and whenever it changes."""
        last = b""
        published_at = 0.0
        while True:
            catalogue = self._catalogue()
            if catalogue != last or self.table.now() - published_at >= BEAT_SECONDS:
                last = catalogue
                published_at = self.table.now()
                await bus.publish(subjects.catalogue(self.supervisor_id), catalogue)
            await asyncio.sleep(LOOK_SECONDS / 5)

    def _catalogue(self, *, leaving: bool = False) -> bytes:
        entries = [
            entry
            for model in self.table.all()
            if (entry := model.entry(self.table.now(), **self._turn_of(model))) is not None
        ]
        return events_pb2.Catalogue(
            supervisor_id=self.supervisor_id, models=entries, leaving=leaving
        ).SerializeToString()

    async def _answer(
        self, bus: Bus, calls: Subscription, members: Members, tasks: asyncio.TaskGroup
    ) -> None:
        async for call in calls:
            try:
                request = msgspec.json.decode(call.payload, type=ModelRequest)
                answer: dict[str, Any] = {
                    "models": [
                        {**model.card(), **self._turn_card(model)}
                        for model in self._asked(request, members, tasks)
                    ]
                }
            except msgspec.DecodeError as fault:
                answer = {"error": {"code": "invalid_value", "message": str(fault)}}
            except Refused as refusal:
                answer = {"error": refusal.answer}
            except Exception as fault:
                # An unknown fault of one request ends neither the deployment nor later requests.
                _log.exception("a request about models failed")
                answer = {"error": {"code": "internal_error", "message": str(fault)}}
            # Whoever reads the answer and asks for the model finds the gateways informed.
            await bus.publish(subjects.catalogue(self.supervisor_id), self._catalogue())
            await bus.publish(call.reply, msgspec.json.encode(answer))

    def _asked(
        self, request: ModelRequest, members: Members, tasks: asyncio.TaskGroup
    ) -> list[ModelStages]:
        """Begins what a request asks for, and returns the models that it concerns. Raises
        `Refused`."""
        match request.do:
            case "list":
                return self.table.all()
            case "load":
                return [self._loads.load(request, tasks)]
            case "scale":
                return [self._loads.rescale(request)]
            case "unload":
                return [self._loads.unload(request.model, members, tasks)]
            case "sleep" | "wake" | "pin" | "unpin":
                return [self._turn(request, tasks)]
            case "weights":
                return [self._replace_weights(request, tasks)]
        raise Refused(
            "invalid_value",
            f"do is {request.do!r}; allowed: list, load, scale, unload, sleep, wake, pin, unpin, "
            "weights",
        )

    def _turn_of(self, model: ModelStages) -> dict[str, Any]:
        return {} if self._turns is None else self._turns.entry(model.name)

    def _turn_card(self, model: ModelStages) -> dict[str, Any]:
        return {} if self._turns is None else self._turns.card(model.name)

    def _turn(self, request: ModelRequest, tasks: asyncio.TaskGroup) -> ModelStages:
        """Has a model sleep, wake or stay awake. Raises `Refused`."""
        model = self.table.named(request.model)
        if self._turns is None:
            raise Refused("no_turns", "models take turns where `headwater up` has --resident")
        model = self.table.served(model.name)
        problem = ""
        if request.do == "sleep":
            problem = self._turns.sleep(model.name, tasks)
        elif request.do == "wake":
            self._turns.wake(model.name)
        else:
            problem = self._turns.pin(model.name, is_pinned=request.do == "pin")
        if problem:
            raise Refused("turn_refused", problem)
        return model

    def _replace_weights(self, request: ModelRequest, tasks: asyncio.TaskGroup) -> ModelStages:
        """Begins to put other weights in the place of a model's. Raises `Refused`."""
        with refusing():
            require(is_model_place(request.folder), "folder", request.folder, PLACE_ALLOWED)
        model = self.table.served(request.model)
        if model.is_replacing:
            raise Refused("weights_refused", f"weights of {model.name!r} are just being replaced")
        model.is_replacing = True
        model.weights_problem = ""
        tasks.create_task(self._run_weights(model, request, tasks))
        return model

    async def _run_weights(
        self, model: ModelStages, request: ModelRequest, tasks: asyncio.TaskGroup
    ) -> None:
        try:
            lost = await self._weights.replace(model, request)
            for number in lost:
                if not await self._start_again(model, number, tasks):
                    break
        finally:
            model.progress = None
            model.is_replacing = False
            self.table.changed.set()

    async def _start_again(self, model: ModelStages, number: int, tasks: asyncio.TaskGroup) -> bool:
        """Ends an engine, starts another one and waits until it is ready, so that all others answer
        meanwhile. Returns whether it is ready."""
        if model.state is not State.SERVING:
            return False
        # Both begin before the next look at the model, which would start one more.
        await asyncio.gather(
            self.table.retire(model, number), model.start_engine(tasks, self.table.now)
        )
        if model.problem:
            model.weights_problem = f"an engine with the model's weights: {model.problem}"
        return not model.problem
