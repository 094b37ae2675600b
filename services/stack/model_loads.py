"""Loads and unloads models of a cluster that runs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import structlog

from ..models.store import name_of
from ..runtime.hardware import resolve_device
from ..runtime.membership import Members
from ..runtime.model_name import PLACE_ALLOWED, check_model_name, is_model_place
from ..runtime.progress import Report
from ..runtime.settings import require
from . import engine_calls
from .memory_shares import StartedModel
from .model_pull import pull_model
from .model_request import ModelRequest
from .model_stages import ModelStages, State
from .model_table import ModelTable
from .own_settings import own_settings, settings_to_pull
from .refused import LOAD_FAILURES, Refused, refusing
from .remembered_models import RememberedModels
from .replica_scaling import ReplicaScaling
from .scaling import Scaler, ScaleRules
from .settings import StackSettings
from .settings_beside import defaults_of, left_out
from .stage_process import SupervisorPipe, begin_all

_log = structlog.get_logger()

SETTLE_SECONDS = 1.5
"""Time until a request that was admitted before an unload shows in its replica's heartbeat."""
UNLOAD_SECONDS = 120.0
"""Time that running requests of a model have when it is unloaded, before its replicas are told to
leave."""


class ModelLoads:
    """Loads that are remembered: `again` repeats them when the cluster starts."""

    def __init__(
        self, models: ModelTable, scaling: ReplicaScaling, supervisor: SupervisorPipe
    ) -> None:
        self._models = models
        self._scaling = scaling
        self._supervisor = supervisor
        self._takes_turns = bool(models.settings.resident_bytes)
        self._remembered = RememberedModels(models.settings.state_dir, models.report)

    def load(self, request: ModelRequest, tasks: asyncio.TaskGroup) -> ModelStages:
        with refusing():
            require(is_model_place(request.model), "model", request.model, PLACE_ALLOWED)
            name = request.served_model_name or name_of(request.model)
            check_model_name("served_model_name", name)
            rules = self._models.rules_of(request)
            settings_to_pull(self._models.settings, request, own_settings(request))
        self._check_turns(name, rules)
        if self._takes_turns and resolve_device(self._models.settings.device) == "cuda":
            # An engine that starts takes its memory beside those that are awake.
            raise Refused(
                "no_room",
                f"{name!r} cannot be loaded while models take turns on a GPU: name it when "
                "`headwater up` starts",
            )
        known = self._models.get(name)
        if known is not None and known.state is not State.FAILED:
            raise Refused("model_exists", f"the model {name!r} is {known.state.value} already")
        model = self._models.add(name, rules)
        model.task = tasks.create_task(self._run_load(model, request, tasks))
        self._models.changed.set()
        return model

    def rescale(self, request: ModelRequest) -> ModelStages:
        """Other bounds for a model's replicas; what is not given stays as it is. Kept with what is
        loaded again."""
        model = self._models.named(request.model)
        if model.state not in (State.LOADING, State.SERVING):
            raise Refused("model_not_served", f"the model {request.model!r} is {model.state.value}")
        with refusing():
            rules = model.rules.with_bounds(request.min_replicas, request.max_replicas)
        self._check_turns(model.name, rules)
        model.rules = rules
        model.scaler = Scaler(model.rules, self._models.now())
        self._remembered.rescale(model.name, model.rules.min_replicas, model.rules.max_replicas)
        self._models.changed.set()
        return model

    def _check_turns(self, name: str, rules: ScaleRules) -> None:
        """Raises `Refused` for other numbers of replicas than one, where models take turns."""
        if self._takes_turns and (rules.min_replicas, rules.max_replicas) != (1, 1):
            raise Refused(
                "invalid_value", f"{name!r} has one engine: models take turns (--resident)"
            )

    async def _check_size(self, model: ModelStages) -> None:
        """Raises `Refused` for a model that is larger than what awake models may have together, and
        `EngineCallFailed`."""
        if not self._takes_turns:
            return
        for engine in model.engines.values():
            load = (await engine_calls.described(engine.addresses["grpc"])).load
            num_bytes = 0 if load is None else load.num_releasable_bytes
            if num_bytes > self._models.settings.resident_bytes:
                raise Refused(
                    "no_room",
                    f"{model.name!r} takes {num_bytes / 1e9:.4g} GB, --resident gives awake models "
                    f"{self._models.settings.resident_bytes / 1e9:.4g} GB",
                )

    def again(self, tasks: asyncio.TaskGroup) -> None:
        """Loads what was loaded on the cluster before and never unloaded. A model that fails stays
        known: it may only be out of reach for now."""
        if self._remembered.problem:
            self._models.report(self._remembered.problem)
        for name, request in self._remembered.items():
            if name in self._models:
                # It is one of the models that the cluster starts with.
                continue
            try:
                self.load(request, tasks)
            except Refused as refusal:
                self._models.report(
                    f"{request.served_model_name or request.model} is not loaded again: {refusal}"
                )

    async def _run_load(
        self, model: ModelStages, request: ModelRequest, tasks: asyncio.TaskGroup
    ) -> None:
        self._models.report(f"{model.name}: loading")
        try:
            own = own_settings(request)
            given = settings_to_pull(self._models.settings, request, own)
            folder = await pull_model(request.model, given, self._supervisor, model.report)
            if given.draft_model is not None:
                own["draft_model"] = str(await self._pull_draft(given, model.report))
            started = StartedModel.of(folder, model.name)
            if sentence := left_out(self._models.settings, started):
                self._models.report(sentence)
            plan = self._models.plan_beside(
                started, model=(request.model,), served_model_name=None, **own
            )
            stages = model.make_first_stages(self._models.weights.in_force(model, plan))
            await begin_all(stages, model.report)
            await self._check_size(model)
        except Exception as fault:
            # Any error ends this model alone, not the deployment.
            if not isinstance(fault, LOAD_FAILURES):
                _log.exception("a model cannot be loaded", model=model.name)
            await self._models.end(model)
            model.state = State.FAILED
            model.problem = str(fault)
            self._models.report(f"{model.name}: {fault}")
            return
        for stage in stages:
            stage.guard(tasks)
        self._models.serve(model)
        self._models.weights.report(model)
        self._remembered.add(model.name, request)
        if model.rules != self._models.rules_of(request):
            # Other bounds were asked for while it was loaded.
            self._remembered.rescale(model.name, model.rules.min_replicas, model.rules.max_replicas)
        self._models.report(f"{model.name}: serving")

    async def _pull_draft(self, settings: StackSettings, report: Report) -> Path:
        """Folder of a draft model, whose weights are used as they are. Raises `PullFailed`."""
        assert settings.draft_model is not None
        plain = defaults_of(("revision", "quantization", "calibration", "model_code"))
        of_draft = replace(settings, draft_model=None, **plain)
        return await pull_model(settings.draft_model, of_draft, self._supervisor, report)

    def unload(self, name: str, members: Members, tasks: asyncio.TaskGroup) -> ModelStages:
        model = self._models.named(name)
        if model.state is not State.UNLOADING:
            if model.task is not None:
                model.task.cancel()
            self._remembered.drop(name)
            self._models.weights.forget(name)
            model.state = State.UNLOADING
            model.problem = ""
            model.task = tasks.create_task(self._run_unload(model, model.task, members))
            self._models.changed.set()
        return model

    async def _run_unload(
        self, model: ModelStages, before: asyncio.Task[None] | None, members: Members
    ) -> None:
        """Gateways refuse new requests by the catalogue; those that run end first, then the
        replicas leave."""
        self._models.report(f"{model.name}: unloading")
        if before is not None:
            await asyncio.wait((before,))
        if model.engines:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNLOAD_SECONDS):
                    await asyncio.sleep(SETTLE_SECONDS)
                    await members.wait_for(
                        lambda members: (
                            not self._scaling.look(model, members, self._models.now()).num_requests
                        )
                    )
        await self._models.end(model)
        self._models.drop(model)
        self._models.report(f"{model.name}: unloaded")
