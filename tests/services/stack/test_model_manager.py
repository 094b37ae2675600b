"""What is asked of a line about its models, whatever it is, leaves the manager in its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import read_settings
from headwater.services.stack.model_manager import ModelManager
from headwater.services.stack.model_request import ModelRequest
from headwater.services.stack.model_stages import ModelStages
from headwater.services.stack.plan import StackPlan
from headwater.services.stack.refused import Refused
from headwater.services.stack.remembered_models import RememberedModels
from headwater.services.stack.stage_process import KeptStage, SupervisorPipe, begin_all
from tests.chatting_model import make_chatting_model
from tests.services.engine.engine_process import engine_process
from tests.services.stack.test_model_stages import NEVER_READY, SLOW_TO_LEAVE, Stages
from tests.services.stack.test_plan import plan
from tests.services.stack.test_stage_process import READY


@contextlib.asynccontextmanager
async def managed(
    manager: ModelManager, nats_url: str, stack: StackPlan
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Any]]]:
    """The manager runs; what is given asks it over the bus."""

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            await manager.run(bus, tasks)

    async def answer(request: dict[str, Any], seconds: float) -> bytes | None:
        sent = msgspec.json.encode(request)
        return await bus.request(
            subjects.models_control(stack.supervisor_id), sent, seconds=seconds
        )

    async def ask(request: dict[str, Any]) -> Any:
        # A request that changes nothing is repeated until the manager listens; others are sent
        # once.
        while await answer({"do": "list"}, 2) is None:
            assert not running.done()
        answered = await answer(request, 100)
        assert answered is not None
        return msgspec.json.decode(answered)

    async with Bus.open(nats_url) as bus, asyncio.timeout(120):
        running = asyncio.ensure_future(run())
        try:
            yield ask
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_every_stage_of_a_model_has_the_settings_that_it_was_loaded_with(
    nats_url: str, tmp_path: Path
) -> None:
    folder = make_chatting_model(tmp_path / "second")
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=1, nats_url=nats_url, cache_dir=tmp_path)
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    stages.may_spawn.set()
    flags_of: dict[str, list[str]] = {}

    def make(
        name: str, module: str, flags: Callable[[], list[str]], env: dict[str, str] | None = None
    ) -> KeptStage:
        flags_of[name] = flags()
        return stages.make(name, module, flags, env)

    manager = ModelManager(stack.settings, pipe, make, hurry=asyncio.Event(), report=lambda _: None)
    first = manager.table.first(stack)
    await begin_all(first.stages(), silent)
    manager.table.serve(first)
    async with managed(manager, nats_url, stack) as ask:
        loaded = {
            "do": "load",
            "model": str(folder),
            "served_model_name": "exact",
            "min_replicas": 2,
            "max_replicas": 2,
        }
        assert (await ask(loaded | {"numerics": "fast"}))["error"]["code"] == "invalid_value"
        for bad in ({"served_model_name": "a\nserving"}, {"model": f"{folder}/../second"}):
            refusal = (await ask(loaded | bad))["error"]
            assert refusal["code"] == "invalid_value"
            assert "printable characters" in refusal["message"]
        for own, sentence in (
            ({"port": 1}, "--settings is 'port'; allowed: revision, "),
            ({"max_model_len": "long"}, "--max-model-len is 'long'; allowed: a whole number"),
            ({"eviction": "none"}, "--eviction is 'none'; allowed: lru, value"),
            ({"revision": "\0"}, "--revision is '\\x00'; allowed: printable text"),
            (
                {"kv_disk_dir": "~nobody-here/x"},
                "--kv-disk-dir is '~nobody-here/x'; allowed: a path",
            ),
            (
                {"chat_template": "/etc/hosts"},
                "--chat-template is '/etc/hosts'; allowed: none",
            ),
        ):
            refusal = (await ask(loaded | {"settings": own}))["error"]
            assert (refusal["code"], refusal["message"][: len(sentence)]) == (
                "invalid_value",
                sentence,
            )
            assert refusal["param"] == ("settings" if "port" in own else next(iter(own)))
        own = {"max_model_len": 64, "reasoning_parser": "none"}
        assert "error" not in await ask(loaded | {"numerics": "tree", "settings": own})

        async def states() -> dict[str, str]:
            return {card["id"]: card["state"] for card in (await ask({"do": "list"}))["models"]}

        while (await states())["exact"] != "serving":  # noqa: ASYNC110 (asked over the bus)
            await asyncio.sleep(0.05)
        numerics = {
            name: read_settings(EngineSettings, flags, env={}).numerics
            for name, flags in flags_of.items()
            if "engine" in name
        }
        assert numerics == {
            "engine-0": "default",
            "exact-engine-0": "tree",
            "exact-engine-1": "tree",
        }
        assert "--max-model-len=64" in flags_of["exact-engine-1"]
        assert {"--max-model-len=64", "--reasoning-parser=none"} <= {*flags_of["exact-processor-0"]}
        # The next cluster with this state folder loads it so again.
        assert [each.numerics for each in RememberedModels(tmp_path)] == ["tree"]
    await asyncio.gather(
        *(
            stage.stop(5, asyncio.Event())
            for model in manager.table.all()
            for stage in model.stages()
        )
    )
    pipe.close()


async def test_bounds_that_are_asked_for_while_a_model_is_loaded_are_remembered(
    nats_url: str, tmp_path: Path
) -> None:
    folder = make_chatting_model(tmp_path / "second")
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=1, nats_url=nats_url, cache_dir=tmp_path)
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    stages.may_spawn.set()
    manager = ModelManager(
        stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=lambda _: None
    )
    try:
        first = manager.table.first(stack)
        await begin_all(first.stages(), silent)
        manager.table.serve(first)
        async with managed(manager, nats_url, stack) as ask:

            async def state() -> str:
                [found] = [
                    card["state"]
                    for card in (await ask({"do": "list"}))["models"]
                    if card["id"] == "late"
                ]
                return str(found)

            stages.may_spawn.clear()
            assert "error" not in await ask(
                {"do": "load", "model": str(folder), "served_model_name": "late"}
            )
            assert "error" not in await ask(
                {"do": "scale", "model": "late", "min_replicas": 0, "max_replicas": 3}
            )
            assert await state() == "loading"
            stages.may_spawn.set()
            while await state() != "serving":  # noqa: ASYNC110 (asked over the bus)
                await asyncio.sleep(0.05)
            assert [
                (each.min_replicas, each.max_replicas) for each in RememberedModels(tmp_path)
            ] == [(0, 3)]
    finally:
        await asyncio.gather(
            *(
                stage.stop(5, asyncio.Event())
                for model in manager.table.all()
                for stage in model.stages()
            )
        )
        pipe.close()


async def test_a_model_that_cannot_even_be_looked_for_is_refused_and_the_next_request_answered(
    nats_url: str, tmp_path: Path
) -> None:
    pipe = SupervisorPipe()
    stack = plan(
        state_dir=tmp_path,
        replicas=None,
        min_replicas=0,
        max_replicas=1,
        executor="simulated",
        nats_url=nats_url,
    )
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    stages.may_spawn.set()
    manager = ModelManager(
        stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=lambda _: None
    )
    first = manager.table.first(stack)
    await begin_all(first.stages(), silent)
    manager.table.serve(first)

    async with managed(manager, nats_url, stack) as ask:
        long = "x" * 5000
        unknown = "~nobody.here/model"
        assert (await ask({"do": "load", "model": long}))["error"]["code"] == "invalid_value"
        assert (await ask({"do": "load", "model": unknown}))["error"]["code"] == "model_not_found"
        [card] = (await ask({"do": "list"}))["models"]
        assert (card["id"], card["state"]) == ("m", "serving")
    await asyncio.gather(*(stage.stop(5, asyncio.Event()) for stage in first.stages()))
    pipe.close()


async def test_a_model_has_its_text_stages_until_a_replica_that_was_leaving_already_is_gone(
    nats_url: str, tmp_path: Path
) -> None:
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=1, nats_url=nats_url, cache_dir=tmp_path)
    folders = {"engine": tmp_path / "engines", "text": tmp_path / "text"}
    for folder in folders.values():
        folder.mkdir()
    # What a text stage says as it ends shows which replicas are still there.
    looks = f"import os, signal\nlog = open({str(folders['engine'] / 'engine-0.log')!r})\n"
    looks += (
        "def leave(*_):\n    os.write(1, b'gone' if 'left' in log.read() else b'there'); "
        "os._exit(0)\n"
    )
    engines = Stages(folders["engine"], pipe, SLOW_TO_LEAVE)
    texts = Stages(
        folders["text"], pipe, READY + looks + "signal.signal(15, leave)\n" + NEVER_READY
    )
    for each in (engines, texts):
        each.may_spawn.set()

    def make(
        name: str, module: str, flags: Callable[[], list[str]], env: dict[str, str] | None = None
    ) -> KeptStage:
        return (engines if "engine" in name else texts).make(name, module, flags, env)

    manager = ModelManager(stack.settings, pipe, make, hurry=asyncio.Event(), report=lambda _: None)
    model = manager.table.first(stack)
    await begin_all(model.stages(), silent)
    manager.table.serve(model)
    while not all(each.is_armed for each in (engines, texts)):  # noqa: ASYNC110 (other processes)
        await asyncio.sleep(0.01)
    async with managed(manager, nats_url, stack) as ask:
        await ask({"do": "list"})
        leaving = asyncio.ensure_future(manager.table.retire(model, 0))
        await asyncio.sleep(0)
        assert "error" not in await ask({"do": "unload", "model": "m"})
        while manager.table.all():  # noqa: ASYNC110 (processes end)
            await asyncio.sleep(0.01)
        await leaving
    sent = {log.stem: log.read_text().split()[-1] for log in folders["text"].iterdir()}
    assert sent == dict.fromkeys(("processor-0", "output-processor-0"), "gone")
    pipe.close()


@pytest.mark.parametrize(
    ("device", "request_", "problem"),
    [
        (
            "cpu",
            ModelRequest(do="load", model="gemma3-270m", served_model_name="x", max_replicas=2),
            "'x' has one engine",
        ),
        ("cpu", ModelRequest(do="scale", model="m", min_replicas=0), "'m' has one engine"),
        (
            "cuda",
            ModelRequest(do="load", model="gemma3-270m", served_model_name="x"),
            "'x' cannot be loaded while",
        ),
    ],
)
def test_where_models_take_turns_each_has_one_engine_that_has_room_to_start(
    tmp_path: Path, device: str, request_: ModelRequest, problem: str
) -> None:
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=1, resident=1.0, device=device)
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    manager = ModelManager(
        stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=lambda _: None
    )
    model = manager.table.first(stack)
    manager.table.serve(model)
    rules = model.rules
    nothing: Any = None
    with pytest.raises(Refused, match=problem):
        manager._asked(request_, nothing, nothing)
    assert model.rules == rules
    pipe.close()


async def test_a_model_that_is_larger_than_awake_ones_may_be_is_refused(tmp_path: Path) -> None:
    pipe = SupervisorPipe()
    stack = plan(state_dir=tmp_path, replicas=1, resident=1e-6)
    stages = Stages(tmp_path, pipe, READY + NEVER_READY)
    manager = ModelManager(
        stack.settings, pipe, stages.make, hurry=asyncio.Event(), report=lambda _: None
    )
    with engine_process("--takes-turns") as engine:
        stage = SimpleNamespace(addresses={"grpc": engine.address})
        loaded = cast("ModelStages", SimpleNamespace(name="large", engines={0: stage}))
        with pytest.raises(Refused, match=r"'large' takes .* GB, --resident gives awake models"):
            await manager._loads._check_size(loaded)
    pipe.close()
