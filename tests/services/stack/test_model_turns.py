"""Engines that are called to sleep and to wake as the policy of turns says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.proto import engine_pb2 as pb
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.stack import engine_calls
from headwater.services.stack.model_stages import ModelStages, State
from headwater.services.stack.model_turns import START_SECONDS, Demand, ModelTurns
from headwater.services.stack.turn_policy import Waiting
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)

ENGINE_BYTES = 2048 * 16 * 8
"""Of an engine's simulated cache."""


@dataclass
class Device:
    """Two models, each with an engine of its own, and what is known of them."""

    engines: dict[str, EngineProcess]
    turns: ModelTurns
    tasks: asyncio.TaskGroup
    reports: list[str]
    states: dict[str, State] = field(default_factory=dict)
    """Of models that are not served."""
    dead: set[str] = field(default_factory=set)
    members: Members = field(default_factory=lambda: Members(Bus(None), [Kind.ENGINE]))

    def models(self) -> list[ModelStages]:
        def stages(name: str) -> Any:
            return SimpleNamespace(
                name=name,
                state=self.states.get(name, State.SERVING),
                engines={0: None},
                replica_id=lambda number: name,
            )

        return [cast("ModelStages", stages(name)) for name in self.engines]

    async def look(self, demand: dict[str, Demand] | None = None) -> None:
        for engine in (self.engines[name] for name in self.engines.keys() - self.dead):
            self.members.on_member(await engine_calls.described(engine.address), from_bus=True)
        self.turns.look(self.models(), self.members, demand or {}, self.tasks)

    async def kill(self, name: str) -> None:
        """Ends an engine, which the others are told."""
        gone = await engine_calls.described(self.engines[name].address)
        os.kill(self.engines[name].process.pid, signal.SIGKILL)
        self.members.on_member(replace(gone, leaving=True), from_bus=True)
        self.dead.add(name)

    async def until(self, states: dict[str, str], demand: dict[str, Demand] | None = None) -> None:
        while {
            name: self.turns.entry(name).get("turn") for name in self.engines.keys() - self.dead
        } != states:
            await self.look(demand)
            await asyncio.sleep(0.02)

    async def until_released(self, name: str, num_bytes: int) -> None:
        """Returns when a model's engine has given so much memory back."""
        address = self.engines[name].address
        load = (await engine_calls.described(address)).load
        while load is None or load.num_released_bytes != num_bytes:
            await asyncio.sleep(0.02)
            load = (await engine_calls.described(address)).load

    async def sleep(self, name: str) -> None:
        """Begins to put a model to sleep, once no other switch is under way."""
        while self.turns.sleep(name, self.tasks):  # noqa: ASYNC110 (a call in another task)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def two_engines(*flags: str) -> AsyncIterator[Device]:
    """Engines of `a` and `b`, both awake at first, with room for one."""
    reports: list[str] = []
    with (
        engine_process("--takes-turns", "--replica-id=a", *flags) as a,
        engine_process("--takes-turns", "--replica-id=b", *flags) as b,
    ):
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            turns = ModelTurns(ENGINE_BYTES * 3 // 2, reports.append)
            yield Device({"a": a, "b": b}, turns, tasks, reports)


async def test_a_call_that_fails_is_not_repeated_without_a_pause() -> None:
    async with two_engines() as device:
        await device.until({"a": "asleep", "b": "awake"})
        os.kill(device.engines["a"].process.pid, signal.SIGKILL)
        await asyncio.to_thread(device.engines["a"].wait)
        demand = {"a": {"x": Waiting(asyncio.get_running_loop().time())}}
        # Heartbeats of `a` have yet to expire.
        while not device.reports:
            device.turns.look(device.models(), device.members, demand, device.tasks)
            await asyncio.sleep(0.02)
        for _ in range(20):
            device.turns.look(device.models(), device.members, demand, device.tasks)
            await asyncio.sleep(0.02)
        assert len(device.reports) == 1


async def test_an_engine_whose_reply_was_lost_is_asked_whether_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def obeyed_without_reply(address: str) -> int:
        await sleep(address)
        raise engine_calls.EngineCallFailed("Deadline Exceeded")

    sleep = engine_calls.sleep
    async with two_engines() as device:
        await device.until({"a": "asleep", "b": "awake"})
        monkeypatch.setattr(engine_calls, "sleep", obeyed_without_reply)
        await device.sleep("b")
        while not device.reports:  # noqa: ASYNC110 (a call in another task)
            await asyncio.sleep(0.02)
        assert device.turns.entry("b")["turn"] == "asleep"


async def test_an_engine_that_is_lost_while_it_falls_asleep_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost(address: str) -> int:
        await device.kill("b")
        await device.look()
        raise engine_calls.EngineCallFailed("Socket closed")

    async with two_engines() as device:
        await device.until({"a": "asleep", "b": "awake"})
        monkeypatch.setattr(engine_calls, "sleep", lost)
        await device.sleep("b")
        while not device.reports:  # noqa: ASYNC110 (a call in another task)
            await asyncio.sleep(0.02)
        assert device.turns.entry("b") == {}


async def test_a_model_that_is_unloaded_wakes_to_end_what_it_preempted() -> None:
    async with two_engines("--simulated-step-seconds=0.005") as device:
        await device.until({"a": "asleep", "b": "awake"})
        async with client_of(device.engines["b"]) as client:
            await client.send(add(1, prompt(1), 400, credit=3))
            await client.read_tokens(1, 3)
            await device.sleep("b")
            # Not by looks, which would wake it again for the request.
            while device.turns.entry("b")["turn"] != "asleep":  # noqa: ASYNC110 (a call in another task)
                await asyncio.sleep(0.02)
            device.states["b"] = State.UNLOADING
            await device.until({"a": "asleep", "b": "awake"})
            await client.send(credits=[pb.Credit(stream_id=1, tokens=1000)])
            await client.read_until_finished(1)
            assert client.tokens[1] == answer(prompt(1), 400)


async def test_an_engine_that_was_lost_and_is_asked_for_gets_room_to_start_again() -> None:
    async with two_engines() as device:
        await device.until({"a": "asleep", "b": "awake"})
        await device.kill("a")
        await device.look()
        demand = {"a": {"x": Waiting(asyncio.get_running_loop().time())}}
        await device.until({"b": "asleep"}, demand)
        # And no longer than others have afterwards.
        model = device.turns._model("a")
        assert model.lost_at is not None
        assert not model.needs_room_to_start(model.lost_at + START_SECONDS + 1)


async def test_engines_sleep_and_wake_by_demand_and_by_hand() -> None:
    reports: list[str] = []
    with (
        engine_process("--takes-turns", "--replica-id=a") as a,
        engine_process("--takes-turns", "--replica-id=b") as b,
    ):
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            turns = ModelTurns(ENGINE_BYTES * 3 // 2, reports.append)
            device = Device({"a": a, "b": b}, turns, tasks, reports)
            # Both are awake at first, and there is room for one.
            await device.until({"a": "asleep", "b": "awake"})
            # A model counts as asleep as soon as its engine is called to sleep.
            await device.until_released("a", ENGINE_BYTES)
            loop = asyncio.get_running_loop()
            waiting = {"a": {"x": Waiting(loop.time(), 2.0)}}
            await device.until({"a": "awake", "b": "asleep"}, waiting)
            await device.look()
            assert device.turns.entry("b")["wait_seconds"] > 0
            assert device.turns.entry("a") == {
                "turn": "awake",
                "wait_seconds": 0.0,
                "num_bytes": ENGINE_BYTES,
                "is_pinned": False,
            }
            assert turns.card("a").keys() - turns.entry("a").keys() == {"unused_seconds"}
            assert "bytes are left for the other models" in turns.pin("a", is_pinned=True)
            assert turns.sleep("a", tasks) == ""
            await device.until({"a": "asleep", "b": "asleep"})
            turns.wake("b")
            await device.until({"a": "asleep", "b": "awake"})
            assert reports == []
            # An engine that has died is left out, and is no obstacle to others.
            await device.kill("b")
            await device.until({"a": "awake"}, waiting)
