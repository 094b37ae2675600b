"""Weights of a cluster's models: those of an earlier cluster stay in force, and engines of which it
is unknown what they compute with are started again one after another."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.services.models.manifest import MANIFEST_NAME
from headwater.services.runtime.progress import silent
from headwater.services.stack.model_manager import ModelManager
from headwater.services.stack.model_request import ModelRequest
from headwater.services.stack.model_stages import ModelStages
from headwater.services.stack.model_weights import ModelWeights
from headwater.services.stack.plan import StackPlan
from headwater.services.stack.remembered_weights import (
    WEIGHTS_FILE,
    RememberedWeights,
    Replacement,
)
from headwater.services.stack.stack_error import StackError
from headwater.services.stack.stage_process import SupervisorPipe, begin_all
from tests.services.stack.test_model_stages import NEVER_READY, Stages
from tests.services.stack.test_new_weights import MANIFEST
from tests.services.stack.test_plan import plan
from tests.services.stack.test_stage_process import READY


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Weights that took the place of a model's own in the state folder's last cluster."""
    for folder, revision in (("own", "1"), ("new", "2")):
        (tmp_path / folder).mkdir()
        dataclasses.replace(MANIFEST, revision=revision).write(tmp_path / folder)
    RememberedWeights(tmp_path).put("m", Replacement("1", str(tmp_path / "new")))
    return tmp_path / "new"


def of_model(tmp_path: Path) -> tuple[ModelStages, StackPlan]:
    model = SimpleNamespace(name="m", weights="", plan=None)
    stack = dataclasses.replace(plan(state_dir=tmp_path), model_folder=tmp_path / "own")
    return cast("ModelStages", model), stack


def weights_of(tmp_path: Path, reports: list[str]) -> ModelWeights:
    nothing: Any = None
    return ModelWeights(tmp_path, nothing, reports.append)


def test_they_are_in_force_in_the_next_cluster(new: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    weights = weights_of(tmp_path, reports)
    model, stack = of_model(tmp_path)
    model.plan = weights.in_force(model, stack)
    assert f"--weights-folder={new}" in model.plan.engine(0)
    assert model.weights == "2"
    weights.report(model)
    assert reports == [f"m: has the weights of {new}"]


def test_a_model_starts_with_no_others_where_they_are_gone(new: Path, tmp_path: Path) -> None:
    (new / MANIFEST_NAME).unlink()
    with pytest.raises(StackError, match=r"the weights of 'm' .* cannot be used: .*; bring them"):
        weights_of(tmp_path, []).in_force(*of_model(tmp_path))


def test_another_revision_of_the_model_has_its_own(new: Path, tmp_path: Path) -> None:
    dataclasses.replace(MANIFEST, revision="3").write(tmp_path / "own")
    reports: list[str] = []
    weights = weights_of(tmp_path, reports)
    model, stack = of_model(tmp_path)
    model.plan = weights.in_force(model, stack)
    assert model.plan == stack
    weights.report(model)
    assert "has its own weights" in reports[0]
    assert RememberedWeights(tmp_path).of("m") is None


def test_a_file_that_cannot_be_read_lets_no_model_start_with_old_weights(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_text("{")
    with pytest.raises(StackError, match=r"weights\.json cannot be read"):
        weights_of(tmp_path, [])


def test_a_model_that_is_unloaded_begins_with_its_own(new: Path, tmp_path: Path) -> None:
    weights = weights_of(tmp_path, [])
    weights.forget("m")
    assert weights_of(tmp_path, []).in_force(*of_model(tmp_path)).weights_folder is None


async def test_engines_are_started_again_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=2, cache_dir=tmp_path)
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    stages.may_spawn.set()
    num_ready: dict[str, int] = {}

    def report(sentence: str) -> None:
        num_ready[sentence] = sum(bool(each.addresses) for each in model.engines.values())

    async def replace(*_: object) -> tuple[int, ...]:
        return (0, 1)

    monkeypatch.setattr(ModelWeights, "replace", replace)
    manager = ModelManager(stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=report)
    model = manager.table.first(stack)
    await begin_all(model.stages(), silent)
    manager.table.serve(model)
    async with asyncio.TaskGroup() as tasks:
        await manager._run_weights(model, ModelRequest(do="weights", model="m"), tasks)
        for stage in model.engines.values():
            await stage.stop(5, asyncio.Event())
    assert num_ready["engine-0 has left"] >= 1
    assert num_ready["engine-1 has left"] >= 1
    assert len(model.engines) == 2
    await asyncio.gather(
        *(each.stop(5, asyncio.Event()) for each in [*model.processors, *model.output_processors])
    )
    pipe.close()
