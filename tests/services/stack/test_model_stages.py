"""Replicas of a model that are told to leave while they still start, at each step of starting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.services.stack.model_manager import ModelManager
from headwater.services.stack.model_stages import ModelStages
from headwater.services.stack.scaling import Scaler, ScaleRules
from headwater.services.stack.stage_process import (
    KeptStage,
    StageProcess,
    StageProgram,
    SupervisorPipe,
)
from tests.coded_stage.__main__ import PROGRAM
from tests.services.stack.test_plan import plan
from tests.services.stack.test_stage_process import READY

RULES = ScaleRules(min_replicas=0, max_replicas=2)


class Stages:
    """Makes stages of small processes, and remembers each process."""

    def __init__(self, folder: Path, pipe: SupervisorPipe, code: str) -> None:
        self.processes: list[StageProcess] = []
        self.begun = asyncio.Event()
        self.may_spawn = asyncio.Event()
        self.num_released = 0
        self._folder = folder
        self._pipe = pipe
        self._code = code

    def make(
        self, name: str, module: str, flags: Callable[[], list[str]], env: object = None
    ) -> KeptStage:
        async def start() -> StageProcess:
            self.begun.set()
            await self.may_spawn.wait()
            program = StageProgram(PROGRAM, [self._code], os.environ)
            log = self._folder / f"{name}.log"
            process = await StageProcess.start(name, program, log=log, supervisor=self._pipe)
            self.processes.append(process)
            return process

        return KeptStage(name, start, lambda _: None, self.release)

    async def release(self) -> None:
        self.num_released += 1

    @property
    def is_armed(self) -> bool:
        """Whether the processes, one at least, handle signals."""
        return bool(self.processes) and all(
            "armed" in process.log.read_text() for process in self.processes
        )


NEVER_READY = "import time; print('armed', flush=True); time.sleep(600)"
LATE_READY = (
    "import os, json, signal, sys, time\n"
    "def leave(*_):\n"
    + "".join(f"    {line}\n" for line in READY.splitlines()[1:])
    + "    time.sleep(0.2); sys.exit()\n"
    "signal.signal(15, leave)\n" + NEVER_READY
)
"""As an engine that hears of it between its core's word and its own."""


@pytest.mark.parametrize("moment", ["unspawned", "spawned", "ready too late"])
async def test_a_replica_that_leaves_while_it_starts_is_gone_and_harms_no_other(
    tmp_path: Path, moment: str
) -> None:
    pipe = SupervisorPipe()
    stages = Stages(tmp_path, pipe, LATE_READY if moment == "ready too late" else NEVER_READY)
    line = ModelStages(
        name="m", rules=RULES, scaler=Scaler(RULES, 0), make_stage=stages.make, taken_places=set()
    )
    line.plan = plan(executor="simulated")
    # The group ends when nobody keeps the replica running any more.
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(line.start_engine(tasks, lambda: 0.0))
        await stages.begun.wait()
        if moment != "unspawned":
            stages.may_spawn.set()
            while not stages.is_armed:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
        await line.retire_engine(0, asyncio.Event())
        stages.may_spawn.set()
        await asyncio.wait((starting,))
        assert (line.stages(), line.taken_places, line.problem) == ([], set(), "")
    assert len(stages.processes) == (moment != "unspawned")
    for process in stages.processes:
        await process.ended()
    pipe.close()


async def test_a_replica_that_could_not_start_when_it_is_to_leave_harms_no_other(
    tmp_path: Path,
) -> None:
    pipe = SupervisorPipe()
    sent = list[str]()
    stack = plan(
        state_dir=tmp_path, replicas=None, min_replicas=0, max_replicas=2, executor="simulated"
    )
    stages = Stages(tmp_path, pipe, "import sys; sys.exit(3)")
    manager = ModelManager(
        stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=sent.append
    )
    model = manager.table.first(stack)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(model.start_engine(tasks, lambda: 0.0))
        await stages.begun.wait()
        # Chosen to leave, and gone before its turn comes.
        leaving = manager.table.retire(model, next(iter(model.engines)))
        stages.may_spawn.set()
        await asyncio.wait((starting,))
        await tasks.create_task(leaving)
        assert (model.engines, model.taken_places, sent) == ({}, set(), [])
        assert "status 3" in model.problem
    pipe.close()


async def test_memory_kept_for_a_replicas_restart_is_released_where_it_does_not_start(
    tmp_path: Path,
) -> None:
    pipe = SupervisorPipe()
    stages = Stages(tmp_path, pipe, "import sys; sys.exit(3)")
    stages.may_spawn.set()
    model = ModelStages(
        name="m", rules=RULES, scaler=Scaler(RULES, 0), make_stage=stages.make, taken_places=set()
    )
    model.plan = plan(executor="simulated")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        await model.start_engine(tasks, lambda: 0.0)
    assert "status 3" in model.problem
    assert stages.num_released == 1
    pipe.close()


SLOW_TO_LEAVE = (
    "import os, signal, time\n"
    # A print fails where the signal comes while another print is being flushed.
    "def leave(*_):\n    os.write(1, b'leaves\\n'); time.sleep(1); os.write(1, b'left\\n'); "
    "os._exit(0)\n"
    "signal.signal(15, leave)\n" + READY + NEVER_READY
)


async def test_the_end_of_a_replica_is_awaited_again_where_the_first_wait_was_cancelled(
    tmp_path: Path,
) -> None:
    pipe = SupervisorPipe()
    log = tmp_path / "engine-0.log"
    stages = Stages(tmp_path, pipe, SLOW_TO_LEAVE)
    stages.may_spawn.set()
    model = ModelStages(
        name="m", rules=RULES, scaler=Scaler(RULES, 0), make_stage=stages.make, taken_places=set()
    )
    model.plan = plan(executor="simulated")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        await model.start_engine(tasks, lambda: 0.0)
        assert model.problem == ""
        first = asyncio.ensure_future(model.retire_engine(0, asyncio.Event()))
        while "leaves" not in log.read_text():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait((first,))
        assert (list(model.leaving), model.taken_places) == ([0], {0})
        second, third = await asyncio.gather(
            *(model.retire_engine(0, asyncio.Event()) for _ in range(2))
        )
        assert "left" in log.read_text()
        assert (second is not None, third) == (True, None)
        assert (model.stages(), model.taken_places) == ([], set())
    pipe.close()
