"""Weights that a cluster's models compute with, where others took the place of their own: put in
place when asked, and kept for the next cluster of the state folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from ..models.manifest import ModelFolderError, ModelManifest
from .model_pull import PullFailed, pull_model
from .model_request import ModelRequest
from .model_stages import ModelStages
from .new_weights import WeightsRefused, check_same, replace_weights
from .plan import StackPlan
from .remembered_weights import RememberedWeights
from .stack_error import StackError
from .stage_process import SupervisorPipe

_log = structlog.get_logger()


class ModelWeights:
    def __init__(
        self, state_dir: Path, supervisor: SupervisorPipe, report: Callable[[str], None]
    ) -> None:
        """Raises `StackError` for a file in the state folder that cannot be read."""
        self._remembered = RememberedWeights(state_dir)
        self._supervisor = supervisor
        self._report = report

    def in_force(self, model: ModelStages, plan: StackPlan) -> StackPlan:
        """The plan with the weights that the model had in an earlier cluster. Raises `StackError`
        where they cannot be used: old ones in their place would surprise."""
        remembered = self._remembered.of(model.name)
        if remembered is None:
            return plan
        if ModelManifest.read(plan.model_folder).revision != remembered.own_revision:
            return plan
        folder = Path(remembered.folder)
        try:
            check_same(plan.model_folder, folder)
            model.weights = ModelManifest.read(folder).revision
        except (ModelFolderError, WeightsRefused, OSError) as fault:
            raise StackError(
                f"the weights of {model.name!r} were replaced by those of {folder}, which cannot "
                f"be used: {fault}; bring them back, or remove {self._remembered.path} to serve "
                "the model with its own"
            ) from None
        return dataclasses.replace(plan, weights_folder=folder)

    def report(self, model: ModelStages) -> None:
        """Reports what an earlier cluster has put in place, and forgets it for another model of the
        same name."""
        assert model.plan is not None
        remembered = self._remembered.of(model.name)
        if remembered is None:
            return
        if model.plan.weights_folder is not None:
            self._report(f"{model.name}: has the weights of {remembered.folder}")
            return
        self._report(
            f"{model.name}: has its own weights; those of {remembered.folder} took the place of "
            f"another revision's, {remembered.own_revision}"
        )
        self.forget(model.name)

    def forget(self, name: str) -> None:
        """Lets a model of this name begin with its own weights."""
        try:
            self._remembered.put(name, None)
        except OSError as failure:
            self._report(f"the next start may give {name} weights that it had before: {failure}")

    async def replace(self, model: ModelStages, request: ModelRequest) -> Sequence[int]:
        """Replaces the weights of a model, or notes why that failed. Returns the engines that may
        have other weights than the model's, which must be restarted one after another."""
        assert model.plan is not None
        try:
            given = dataclasses.replace(model.plan.settings, revision=None)
            folder = await pull_model(request.folder, given, self._supervisor, model.report)
            seconds, lost = await replace_weights(
                model, folder, self._remembered, ends_requests=request.ends_requests
            )
        except (PullFailed, ModelFolderError, WeightsRefused, OSError) as fault:
            model.weights_problem = str(fault)
            self._report(f"{model.name}: its weights stay: {fault}")
            return fault.lost if isinstance(fault, WeightsRefused) else ()
        except Exception as fault:
            # An unforeseen fault of one replacement does not end the deployment.
            _log.exception("weights cannot be replaced", model=model.name)
            model.weights_problem = f"{type(fault).__name__}: {fault}"
            self._report(f"{model.name}: its weights were not replaced: {model.weights_problem}")
            return ()
        self._report(f"{model.name}: weights are {model.weights}, {seconds:.3f} s without them")
        return lost
