"""The models of a cluster: loads and unloads them when asked over the bus, gives each the replicas
that it should have.

Acts on what `Scaler` says; what is seen comes from heartbeats of engines and from gateways' words
of demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headwater.proto import events_pb2

from ..models.manifest import ModelFolderError
from ..models.store import ModelNotFound, name_of
from ..runtime import subjects
from ..runtime.bus import Bus, Subscription
from ..runtime.hardware import resolve_device
from ..runtime.member import Kind, ReplicaLoad
from ..runtime.membership import Members
from ..runtime.model_name import PLACE_ALLOWED, check_model_name, is_model_place
from ..runtime.progress import Report
from ..runtime.settings import SettingError, require
from ..runtime.tasks import owned_task, set_within
from . import engine_calls
from .embedded import EmbeddedServerError
from .engine_calls import EngineCallFailed
from .memory_shares import StartedModel
from .model_pull import PullFailed, pull_model
from .model_request import ModelRequest
from .model_stages import ModelStages, StageMaker, State
from .model_turns import Demand, ModelTurns, demand_of
from .model_weights import ModelWeights
from .own_settings import own_settings, settings_to_pull
from .plan import StackPlan
from .remembered_models import RememberedModels
from .scaling import Scaler, ScaleRules, Sight
from .settings import StackSettings
from .settings_beside import defaults_of, left_out, plan_beside
from .stack_error import StackError
from .stage_process import StageDied, SupervisorPipe, begin_all

LOAD_FAILURES = (
    *(PullFailed, ModelFolderError, StageDied, EmbeddedServerError, OSError),
    *(EngineCallFailed, SettingError, StackError),
)
"""Failures of a load that say in one sentence what is wrong; so does `Refused`."""
_log = structlog.get_logger()

LOOK_SECONDS = 0.25
BEAT_SECONDS = 1.0
DEMAND_SECONDS = 2.0
"""Seconds for which a gateway's report of waiting requests counts."""
SETTLE_SECONDS = 1.5
"""Time until a request that was admitted before an unload shows in its replica's heartbeat."""
UNLOAD_SECONDS = 120.0
"""Time that running requests of a model have when it is unloaded, before its replicas are told to
leave."""
STOP_SECONDS = 10.0


class Refused(Exception):
    """A request that cannot be met; `code` is for programs, `param` names the field."""

    def __init__(self, code: str, message: str, param: str = "model") -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    @property
    def answer(self) -> dict[str, str]:
        return {"code": self.code, "message": str(self), "param": self.param}


class ModelManager:
    """Use `run`; what it starts, `stages` knows."""

    def __init__(
        self,
        settings: StackSettings,
        supervisor: SupervisorPipe,
        make_stage: StageMaker,
        *,
        hurry: asyncio.Event,
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._make_stage = make_stage
        self._hurry = hurry
        self._report = report
        self._plan: StackPlan | None = None
        self._models: dict[str, ModelStages] = {}
        self._places: set[int] = set()
        self._demand: dict[tuple[str, str], tuple[events_pb2.Demand, float]] = {}
        """Waiting requests by model and gateway, and the time of that report."""
        self._changed = asyncio.Event()
        self._remembered = RememberedModels(settings.state_dir, report)
        self._weights = ModelWeights(settings.state_dir, supervisor, report)
        self._now = time.monotonic
        self._turns: ModelTurns | None = None
        if settings.resident_bytes:
            self._turns = ModelTurns(settings.resident_bytes, report)
            self._turns.on_change = self._changed.set

    def first(self, plan: StackPlan) -> ModelStages:
        """The model that the cluster starts with. The caller begins its stages and calls `serve`.
        Raises `StackError` where its weights were replaced and cannot be read."""
        self._plan = plan
        model = self._add(plan.served_name, self._settings.rules)
        model.make_first_stages(self._weights.in_force(model, plan))
        return model

    def beside(self, started: StartedModel, **own: Any) -> ModelStages:
        """Another model that the cluster starts with, as `first`. `own`: settings that it has for
        itself."""
        model = self._add(started.name, self._rules(ModelRequest(do="load")))
        plan = self._plan_beside(started, **own)
        model.make_first_stages(self._weights.in_force(model, plan))
        return model

    def _plan_beside(self, started: StartedModel, /, **own: Any) -> StackPlan:
        assert self._plan is not None
        return plan_beside(self._plan, self._settings, started, self._prefixes(), **own)

    def _prefixes(self) -> set[str]:
        return {each.plan.prefix for each in self.models() if each.plan is not None}

    def serve(self, model: ModelStages) -> None:
        """Serves the model from when its first stages are ready."""
        model.state = State.SERVING
        model.progress = None
        model.scaler = Scaler(model.rules, self._now())
        self._changed.set()

    def models(self) -> list[ModelStages]:
        return list(self._models.values())

    async def run(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        """Answers requests, announces models, starts and stops them, until cancelled."""
        for model in self.models():
            self._weights.report(model)
            for stage in model.stages():
                stage.guard(tasks)
        assert self._plan is not None
        self._load_again(tasks)
        async with (
            Members(bus, [Kind.ENGINE]).running() as members,
            bus.subscribe(subjects.models_control(self._id)) as calls,
            bus.subscribe(subjects.EVERY_DEMAND) as words,
            bus.subscribe(subjects.HELLO) as hellos,
            owned_task(self._follow_loads(bus)),
            owned_task(self._answer(bus, calls, members, tasks)),
            owned_task(self._follow(words)),
            owned_task(self._greet(hellos)),
            owned_task(self._publish(bus)),
        ):
            try:
                await self._scale(bus, members, tasks)
            finally:
                await bus.publish(subjects.catalogue(self._id), self._catalogue(leaving=True))

    @property
    def supervisor_id(self) -> str:
        return self._id

    @property
    def _id(self) -> str:
        assert self._plan is not None
        return self._plan.supervisor_id

    def _add(self, name: str, rules: ScaleRules) -> ModelStages:
        model = ModelStages(
            name=name,
            rules=rules,
            scaler=Scaler(rules, self._now()),
            make_stage=self._make_stage,
            taken_places=self._places,
        )
        self._models[name] = model
        return model

    async def _scale(self, bus: Bus, members: Members, tasks: asyncio.TaskGroup) -> None:
        while True:
            # Without the bus no heartbeats arrive, so the known members stay.
            for model in self.models() if bus.connected else ():
                if model.state is State.SERVING:
                    self._scale_one(model, members, tasks)
            if self._turns is not None and bus.connected:
                self._turns.look(self.models(), members, self._tenants_waiting(), tasks)
            await set_within(self._changed, LOOK_SECONDS)
            self._changed.clear()

    def _scale_one(self, model: ModelStages, members: Members, tasks: asyncio.TaskGroup) -> None:
        now = self._now()
        if model.is_waiting_to_retry(now):
            return
        sight = self._look(model, members, now)
        surplus = len(model.engines) - model.scaler.wanted(sight, now)
        if surplus < 0:
            self._report(f"{model.name}: starting {-surplus} more, {_reason(sight)}")
            for _ in range(-surplus):
                tasks.create_task(model.start_engine(tasks, self._now)).add_done_callback(
                    lambda _: self._changed.set()
                )
        loads = {
            number: member.load
            for number in model.engines
            if (member := self._member(model, number, members))
        }
        for number in sorted(loads, key=lambda each: (_num_requests(loads[each]), -each))[
            : max(0, surplus)
        ]:
            self._report(f"{model.name}: stopping {model.engines[number].name}, it is not needed")
            tasks.create_task(self._retire(model, number))

    def _look(self, model: ModelStages, members: Members, now: float) -> Sight:
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

    def _tenants_waiting(self) -> dict[str, Demand]:
        """Demand of the tenants that wait for a model, by model."""
        now = self._now()
        return {name: demand_of(self._words(name, now)) for name in self._models}

    async def _follow_loads(self, bus: Bus) -> None:
        """Takes the load messages of engines where models take turns: many a second, which nothing
        else here reads."""
        if self._turns is not None:
            async with bus.subscribe(subjects.EVERY_LOAD) as loads:
                await self._turns.follow(loads)

    async def _follow(self, words: Subscription) -> None:
        async for _, word in words.decoded(events_pb2.Demand.FromString, "demand"):
            if word.model in self._models:
                self._demand[word.model, word.gateway_id] = word, self._now()
                self._changed.set()

    async def _greet(self, hellos: Subscription) -> None:
        async for _ in hellos:
            self._changed.set()

    async def _publish(self, bus: Bus) -> None:
        """Publishes the catalogue of models each second, and whenever it changes."""
        last = b""
        published_at = 0.0
        while True:
            catalogue = self._catalogue()
            if catalogue != last or self._now() - published_at >= BEAT_SECONDS:
                last = catalogue
                published_at = self._now()
                await bus.publish(subjects.catalogue(self._id), catalogue)
            await asyncio.sleep(LOOK_SECONDS / 5)

    def _catalogue(self, *, leaving: bool = False) -> bytes:
        entries = [
            entry
            for model in self.models()
            if (entry := model.entry(self._now(), **self._turn_of(model))) is not None
        ]
        return events_pb2.Catalogue(
            supervisor_id=self._id, models=entries, leaving=leaving
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
            await bus.publish(subjects.catalogue(self._id), self._catalogue())
            await bus.publish(call.reply, msgspec.json.encode(answer))

    def _asked(
        self, request: ModelRequest, members: Members, tasks: asyncio.TaskGroup
    ) -> list[ModelStages]:
        """Begins what a request asks for, and returns the models that it concerns. Raises
        `Refused`."""
        match request.do:
            case "list":
                return self.models()
            case "load":
                return [self._load(request, tasks)]
            case "scale":
                return [self._rescale(request)]
            case "unload":
                return [self._unload(request.model, members, tasks)]
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
        model = self._models.get(request.model)
        if model is None:
            raise Refused("model_not_found", f"the model {request.model!r} does not exist")
        if self._turns is None:
            raise Refused("no_turns", "models take turns where `headwater up` has --resident")
        if model.state is not State.SERVING:
            raise Refused("model_not_served", f"the model {model.name!r} is {model.state.value}")
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
        with _refusing():
            require(is_model_place(request.folder), "folder", request.folder, PLACE_ALLOWED)
        model = self._models.get(request.model)
        if model is None:
            raise Refused("model_not_found", f"the model {request.model!r} does not exist")
        if model.state is not State.SERVING:
            raise Refused("model_not_served", f"the model {model.name!r} is {model.state.value}")
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
            self._changed.set()

    async def _start_again(self, model: ModelStages, number: int, tasks: asyncio.TaskGroup) -> bool:
        """Ends an engine, starts another one and waits until it is ready, so that all others answer
        meanwhile. Returns whether it is ready."""
        if model.state is not State.SERVING:
            return False
        # Both begin before the next look at the model, which would start one more.
        await asyncio.gather(self._retire(model, number), model.start_engine(tasks, self._now))
        if model.problem:
            model.weights_problem = f"an engine with the model's weights: {model.problem}"
        return not model.problem

    def _load(self, request: ModelRequest, tasks: asyncio.TaskGroup) -> ModelStages:
        with _refusing():
            require(is_model_place(request.model), "model", request.model, PLACE_ALLOWED)
            name = request.served_model_name or name_of(request.model)
            check_model_name("served_model_name", name)
            rules = self._rules(request)
            settings_to_pull(self._settings, request, own_settings(request))
        self._check_turns(name, rules)
        if self._turns is not None and resolve_device(self._settings.device) == "cuda":
            # An engine that starts takes its memory beside those that are awake.
            raise Refused(
                "no_room",
                f"{name!r} cannot be loaded while models take turns on a GPU: name it when "
                "`headwater up` starts",
            )
        known = self._models.get(name)
        if known is not None and known.state is not State.FAILED:
            raise Refused("model_exists", f"the model {name!r} is {known.state.value} already")
        model = self._add(name, rules)
        model.task = tasks.create_task(self._run_load(model, request, tasks))
        self._changed.set()
        return model

    def _rescale(self, request: ModelRequest) -> ModelStages:
        """Other bounds for a model's replicas; what is not given stays as it is. Kept with what is
        loaded again."""
        model = self._models.get(request.model)
        if model is None:
            raise Refused("model_not_found", f"the model {request.model!r} does not exist")
        if model.state not in (State.LOADING, State.SERVING):
            raise Refused("model_not_served", f"the model {request.model!r} is {model.state.value}")
        with _refusing():
            rules = model.rules.with_bounds(request.min_replicas, request.max_replicas)
        self._check_turns(model.name, rules)
        model.rules = rules
        model.scaler = Scaler(model.rules, self._now())
        self._remembered.rescale(model.name, model.rules.min_replicas, model.rules.max_replicas)
        self._changed.set()
        return model

    def _check_turns(self, name: str, rules: ScaleRules) -> None:
        """Raises `Refused` for other numbers of replicas than one, where models take turns."""
        if self._turns is not None and (rules.min_replicas, rules.max_replicas) != (1, 1):
            raise Refused(
                "invalid_value", f"{name!r} has one engine: models take turns (--resident)"
            )

    async def _check_size(self, model: ModelStages) -> None:
        """Raises `Refused` for a model that is larger than what awake models may have together, and
        `EngineCallFailed`."""
        if self._turns is None:
            return
        for engine in model.engines.values():
            load = (await engine_calls.described(engine.addresses["grpc"])).load
            num_bytes = 0 if load is None else load.num_releasable_bytes
            if num_bytes > self._settings.resident_bytes:
                raise Refused(
                    "no_room",
                    f"{model.name!r} takes {num_bytes / 1e9:.4g} GB, --resident gives awake models "
                    f"{self._settings.resident_bytes / 1e9:.4g} GB",
                )

    def _load_again(self, tasks: asyncio.TaskGroup) -> None:
        """Loads what was loaded on the cluster before and never unloaded. A model that fails stays
        known: it may only be out of reach for now."""
        if self._remembered.problem:
            self._report(self._remembered.problem)
        for name, request in self._remembered.items():
            if name in self._models:
                # It is one of the models that the cluster starts with.
                continue
            try:
                self._load(request, tasks)
            except Refused as refusal:
                self._report(
                    f"{request.served_model_name or request.model} is not loaded again: {refusal}"
                )

    def _rules(self, request: ModelRequest) -> ScaleRules:
        """Rules of a model: without a number those of the cluster, or one replica where the
        cluster's is fixed."""
        ours = self._settings.rules
        if request.max_replicas is None and request.min_replicas is None:
            return (
                ours
                if self._settings.scales_by_demand
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

    async def _run_load(
        self, model: ModelStages, request: ModelRequest, tasks: asyncio.TaskGroup
    ) -> None:
        assert self._plan is not None
        self._report(f"{model.name}: loading")
        try:
            own = own_settings(request)
            given = settings_to_pull(self._settings, request, own)
            folder = await pull_model(request.model, given, self._supervisor, model.report)
            if given.draft_model is not None:
                own["draft_model"] = str(await self._pull_draft(given, model.report))
            started = StartedModel.of(folder, model.name)
            if sentence := left_out(self._settings, started):
                self._report(sentence)
            plan = self._plan_beside(started, model=(request.model,), served_model_name=None, **own)
            stages = model.make_first_stages(self._weights.in_force(model, plan))
            await begin_all(stages, model.report)
            await self._check_size(model)
        except Exception as fault:
            # Whatever it is, it ends this model alone and not the deployment.
            if not isinstance(fault, (*LOAD_FAILURES, Refused)):
                _log.exception("a model cannot be loaded", model=model.name)
            await self._end(model)
            model.state = State.FAILED
            model.problem = str(fault)
            self._report(f"{model.name}: {fault}")
            return
        for stage in stages:
            stage.guard(tasks)
        self.serve(model)
        self._weights.report(model)
        self._remembered.add(model.name, request)
        if model.rules != self._rules(request):
            # Other bounds were asked for while it was loaded.
            self._remembered.rescale(model.name, model.rules.min_replicas, model.rules.max_replicas)
        self._report(f"{model.name}: serving")

    async def _pull_draft(self, settings: StackSettings, report: Report) -> Path:
        """Folder of a draft model, whose weights are used as they are. Raises `PullFailed`."""
        assert settings.draft_model is not None
        plain = defaults_of(("revision", "quantization", "calibration", "model_code"))
        of_draft = replace(settings, draft_model=None, **plain)
        return await pull_model(settings.draft_model, of_draft, self._supervisor, report)

    def _unload(self, name: str, members: Members, tasks: asyncio.TaskGroup) -> ModelStages:
        model = self._models.get(name)
        if model is None:
            raise Refused("model_not_found", f"the model {name!r} does not exist")
        if model.state is not State.UNLOADING:
            if model.task is not None:
                model.task.cancel()
            self._remembered.drop(name)
            self._weights.forget(name)
            model.state = State.UNLOADING
            model.problem = ""
            model.task = tasks.create_task(self._run_unload(model, model.task, members))
            self._changed.set()
        return model

    async def _run_unload(
        self, model: ModelStages, before: asyncio.Task[None] | None, members: Members
    ) -> None:
        """Gateways refuse new requests by the catalogue; those that run end first, then the
        replicas leave."""
        self._report(f"{model.name}: unloading")
        if before is not None:
            await asyncio.wait((before,))
        if model.engines:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNLOAD_SECONDS):
                    await asyncio.sleep(SETTLE_SECONDS)
                    await members.wait_for(
                        lambda members: not self._look(model, members, self._now()).num_requests
                    )
        await self._end(model)
        del self._models[model.name]
        self._report(f"{model.name}: unloaded")

    async def _retire(self, model: ModelStages, number: int) -> None:
        if (stage := await model.retire_engine(number, self._hurry)) is not None:
            self._report(f"{stage.name} has left")

    async def _end(self, model: ModelStages) -> None:
        """Ends replicas first, also those that are draining: until they end, their requests need
        the text stages."""
        await asyncio.gather(
            *(self._retire(model, number) for number in [*model.engines, *model.leaving])
        )
        await _all(
            stage.stop(STOP_SECONDS, self._hurry)
            for stage in [*model.processors, *model.output_processors]
        )
        model.processors = []
        model.output_processors = []


async def _all(work: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


def _num_requests(load: ReplicaLoad | None) -> int:
    return load.num_running + load.num_waiting if load is not None else 0


def _reason(sight: Sight) -> str:
    if sight.num_without_replica:
        return f"{sight.num_without_replica} waiting"
    return f"{sight.num_requests} requests on {sight.num_replicas}"


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ModelNotFound as fault:
        raise Refused("model_not_found", str(fault).removeprefix("the ")) from None
    except SettingError as fault:
        raise Refused("invalid_value", str(fault), fault.name) from None
    except (ModelFolderError, OSError) as fault:
        raise Refused("invalid_value", str(fault)) from None
