"""Replicas of a model that start, die and leave at any time, until the model is unloaded: nothing
of them is left. Time is virtual, and processes are twins that live and die by lot."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.services.runtime.progress import silent
from headwater.services.stack.model_manager import ModelManager
from headwater.services.stack.model_stages import ModelStages, State
from headwater.services.stack.stage_process import KeptStage, StageDied, SupervisorPipe, begin_all
from tests.services.stack.test_plan import plan
from tests.simulation.virtual_loop import run_virtually

NUM_SEEDS = 200
MOST_REPLICAS = 3


class Twin:
    """A process of a stage."""

    children: tuple[int, ...] = ()
    pid = 1

    def __init__(self, name: str, living: set[Twin]) -> None:
        self._name = name
        self._living = living
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        living.add(self)
        if random.random() < 0.3:
            asyncio.get_running_loop().call_later(random.choice([0, 0.1, 0.5, 1, 3, 20]), self._die)

    async def ready(self) -> dict[str, str]:
        await asyncio.wait((self._ended,), timeout=random.choice([0.01, 0.1, 1, 2]))
        if self._ended.done():
            raise StageDied(self._name, 3, Path("/nonexistent"))
        return {"grpc": self._name}

    async def ended(self) -> int:
        return await asyncio.shield(self._ended)

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        asyncio.get_running_loop().call_later(random.choice([0, 0.1, 1, 5]), self._die)
        await asyncio.wait((self._ended,), timeout=limit)

    def _die(self) -> None:
        self._living.discard(self)
        if not self._ended.done():
            self._ended.set_result(3)


class NoRequests:
    """Members of a cluster in which no replica has a request."""

    def get(self, kind: object, replica_id: str) -> None:
        return None

    async def wait_for(self, condition: object) -> None:
        await asyncio.sleep(random.choice([0, 1]))


def make(living: set[Twin], name: str) -> KeptStage:
    async def start() -> Twin:
        await asyncio.sleep(random.choice([0, 0, 0.1, 1]))
        if random.random() < 0.1:
            raise OSError("no room for a process")
        return Twin(name, living)

    return KeptStage(name, start, lambda _: None)


async def load(manager: ModelManager, model: ModelStages, tasks: asyncio.TaskGroup) -> None:
    """As the manager does, of a model whose folder is there."""
    try:
        await begin_all(model.stages(), silent)
    except (StageDied, OSError):
        await manager.table.end(model)
        model.state = State.FAILED
        return
    for stage in model.stages():
        stage.guard(tasks)
    manager.table.serve(model)


async def scale(manager: ModelManager, model: ModelStages, tasks: asyncio.TaskGroup) -> None:
    """Replicas are asked for and told to leave."""
    for _ in range(random.randint(0, 25)):
        await asyncio.sleep(random.choice([0, 0, 0.05, 0.5, 2]))
        if model.state is not State.SERVING:
            continue
        if random.random() < 0.5 and len(model.engines) < MOST_REPLICAS:
            tasks.create_task(model.start_engine(tasks, lambda: 0.0))
        elif model.engines:
            tasks.create_task(manager.table.retire(model, random.choice(list(model.engines))))


async def live_and_end(folder: Path) -> None:
    living = set[Twin]()

    def maker(
        name: str, module: str, flags: Callable[[], list[str]], env: object = None
    ) -> KeptStage:
        return make(living, name)

    bounds: Any = {
        "replicas": None,
        "min_replicas": random.randint(0, 1),
        "max_replicas": MOST_REPLICAS,
    }
    stack = plan(state_dir=folder, executor="simulated", **bounds)
    members = NoRequests()
    with contextlib.closing(SupervisorPipe()) as pipe:
        manager = ModelManager(
            stack.settings, pipe, maker, hurry=asyncio.Event(), report=lambda _: None
        )
        async with asyncio.TaskGroup() as tasks:
            model = manager.table.first(stack)
            model.task = tasks.create_task(load(manager, model, tasks))
            await scale(manager, model, tasks)
            manager._loads.unload(model.name, members, tasks)  # type: ignore[arg-type]  # as much of them as is used
        # The group has ended: nothing keeps a process running.
        assert (manager.table.all(), model.stages(), model.taken_places, living) == (
            [],
            [],
            set(),
            set(),
        )


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_model_that_is_unloaded_leaves_no_process_and_no_place(seed: int, tmp_path: Path) -> None:
    run_virtually(live_and_end(tmp_path), seed)
