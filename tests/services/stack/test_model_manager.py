"""What is asked of a line about its models, whatever it is, leaves the manager in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.progress import silent
from headwater.services.stack.model_manager import ModelManager
from headwater.services.stack.model_request import ModelRequest
from headwater.services.stack.stage_process import SupervisorPipe, begin_all
from tests.services.stack.test_model_stages import NEVER_READY, Stages
from tests.services.stack.test_plan import plan
from tests.services.stack.test_stage_process import READY


async def test_a_model_that_cannot_even_be_looked_for_is_refused_and_the_next_request_answered(
    nats_url: str, tmp_path: Path
) -> None:
    pipe, stack = (
        SupervisorPipe(),
        plan(
            state_dir=tmp_path, replicas=None, min_replicas=0, max_replicas=1, executor="simulated", nats_url=nats_url
        ),
    )
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    stages.may_spawn.set()
    manager = ModelManager(stack.settings, pipe, stages.make, hurry=asyncio.Event(), say=lambda _: None)
    first = manager.first(stack)
    await begin_all(first.stages(), silent)
    manager.serve(first)

    async with Bus.open(nats_url) as bus, asyncio.timeout(30):

        async def ask(**request: Any) -> Any:
            said = msgspec.json.encode(ModelRequest(**request))
            while (answer := await bus.request(subjects.models_control(stack.supervisor_id), said, seconds=2)) is None:
                assert not running.done()
            return msgspec.json.decode(answer)

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                await manager.run(bus, tasks)

        running = asyncio.ensure_future(run())
        long, unknown = "x" * 5000, "~nobody.here/model"
        assert (await ask(do="load", model=long))["error"]["code"] == "invalid_value"
        assert (await ask(do="load", model=unknown))["error"]["code"] == "model_not_found"
        [card] = (await ask(do="list"))["models"]
        assert (card["id"], card["state"]) == ("m", "serving")
        running.cancel()
        await asyncio.wait({running})
    await asyncio.gather(*(stage.stop(5, asyncio.Event()) for stage in first.stages()))
    pipe.close()
