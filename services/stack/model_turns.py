"""Turns of a cluster's models on its device: what the policy decides is done by calls to engines.

Loads of engines and gateways' messages of demand are its input. One switch is under way at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.proto import events_pb2

from ..runtime.bus import Subscription
from ..runtime.member import ASLEEP, AWAKE, Kind, Member, ReplicaLoad
from ..runtime.membership import Members
from . import engine_calls
from .engine_calls import EngineCallFailed
from .model_stages import ModelStages, State
from .turn_policy import ModelSight, Switch, TurnPolicy, Waiting

RETRY_SECONDS = 1.0
"""Time in which a model is left as it is, after a call of its engine failed."""
START_SECONDS = 60.0
"""Time in which room is kept for an engine that is started again; others then have as long."""
DOUBT_SECONDS = 3.0
"""Time for which an engine reports another state than it was called to, until that is believed:
others may have called it. Loads come each second at least."""
OPERATOR = ""
"""Tenant for which a model is woken by hand: no tenant's key."""
TURNING = (State.SERVING, State.UNLOADING)
"""States in which a model takes turns. One that is unloaded holds memory while it is awake, and has
to wake where requests that it preempted are to end."""
Demand = Mapping[str, Waiting]
"""Tenants whose requests wait for a model, at all gateways."""


class EngineCalls(Protocol):
    """Calls to engines by address, as `engine_calls` makes them. Each raises `EngineCallFailed`."""

    async def sleep(self, address: str) -> int: ...

    async def wake(self, address: str) -> None: ...

    async def described(self, address: str) -> Member: ...


@dataclass(slots=True)
class _Engine:
    """The engine of a model as it was last seen."""

    address: str
    epoch: int
    load: ReplicaLoad
    is_awake: bool
    """Whether the last call woke the model; False: it put the model to sleep. The model's load
    reports the same a moment later."""
    agreed_at: float = 0.0
    """Time at which its load last reported the same, or a switch was under way."""


@dataclass(slots=True)
class _Model:
    is_pinned: bool = False
    retry_at: float = 0.0
    """Time until which its engine is not called again: a call failed."""
    woken_by_hand_at: float | None = None
    """Time since which an operator waits for it."""
    asleep_since: float = 0.0
    engine: _Engine | None = None
    num_bytes: int = 0
    """Device memory of its engine while that is awake."""
    lost_at: float | None = None
    """Time since which it has no engine."""

    def needs_room_to_start(self, now: float) -> bool:
        """Whether an engine that is lost is kept room for: it is awake while it starts."""
        return self.lost_at is not None and (now - self.lost_at) % (2 * START_SECONDS) < (
            START_SECONDS
        )


class ModelTurns:
    def __init__(
        self,
        resident_bytes: int,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        engines: EngineCalls = engine_calls,
    ) -> None:
        """`resident_bytes`: bytes of the device that awake models have together."""
        self._resident_bytes = resident_bytes
        self._policy = TurnPolicy(resident_bytes, clock())
        self._report = report
        self._clock = clock
        self._engines = engines
        self._models: dict[str, _Model] = {}
        self._sights: list[ModelSight] = []
        self._waking = ""
        self._loads: dict[tuple[str, int], ReplicaLoad] = {}
        """Load of a replica by replica and epoch, newer than what heartbeats report."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when loads or switches change what is seen."""

    async def follow(self, loads: Subscription) -> None:
        """Takes the load messages of engines, until cancelled."""
        async for _, load in loads.decoded(events_pb2.Load.FromString, "load"):
            key = load.incarnation.replica_id, load.incarnation.epoch
            before = self._loads.get(key)
            self._loads[key] = now = ReplicaLoad.from_pb(load)
            if before is None or _has_work(before) != _has_work(now):
                self.on_change()

    def look(
        self,
        models: Iterable[ModelStages],
        members: Members,
        demand: Mapping[str, Demand],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Looks at all models, and begins the switch that is due. To be called several times a
        second, and when demand changes."""
        now = self._clock()
        served = [model for model in models if model.state in TURNING]
        self._loads = {
            (each.replica_id, each.epoch): self._loads[each.replica_id, each.epoch]
            for each in members.of(Kind.ENGINE)
            if (each.replica_id, each.epoch) in self._loads
        }
        for model in served:
            self._see(model, members, now)
        self._sights = [
            self._sight(model.name, demand.get(model.name, {}), now) for model in served
        ]
        self._policy.look(self._sights, now)
        if (switch := self._policy.decide(self._sights, now)) is not None:
            tasks.create_task(self._do(switch))

    def entry(self, name: str) -> dict[str, Any]:
        """Fields of the model's entry in the catalogue, which is published whenever one changes: so
        none is a time."""
        engine = self._model(name).engine
        if engine is None:
            return {}
        wait = self._policy.wait_seconds(name, self._sights, self._clock())
        state = AWAKE if engine.is_awake else "waking" if name == self._waking else "asleep"
        return {
            "turn": state,
            "wait_seconds": round(wait, 1),
            "num_bytes": engine.load.num_releasable_bytes,
            "is_pinned": self._model(name).is_pinned,
        }

    def card(self, name: str) -> dict[str, Any]:
        """Fields of the model's card for administrators."""
        if not (entry := self.entry(name)):
            return {}
        unused = self._clock() - self._policy.last_used(name)
        return entry | {"unused_seconds": round(unused, 1) if math.isfinite(unused) else -1.0}

    def pin(self, name: str, *, is_pinned: bool) -> str:
        """Has a model stay awake, or no longer. Returns why not; empty: done."""
        pins = {each for each, model in self._models.items() if model.is_pinned} | {name}
        pinned = sum(each.num_bytes for each in self._sights if each.name in pins)
        largest = max((each.num_bytes for each in self._sights if each.name not in pins), default=0)
        if is_pinned and pinned + largest > self._resident_bytes:
            return (
                f"with {name!r} awake for good, {self._resident_bytes - pinned} bytes are left for "
                f"the other models, the largest of which needs {largest}"
            )
        self._model(name).is_pinned = is_pinned
        if is_pinned:
            self.wake(name)
        self.on_change()
        return ""

    def wake(self, name: str) -> None:
        """Wakes a model in its turn, as if a request waited for it."""
        self._model(name).woken_by_hand_at = self._clock()
        self.on_change()

    def sleep(self, name: str, tasks: asyncio.TaskGroup) -> str:
        """Puts a model to sleep until it is asked for. Returns why not; empty: it falls asleep."""
        if self._model(name).is_pinned:
            return f"{name!r} is pinned"
        switch = Switch((name,), "")
        if not self._policy.begin(switch, self._clock()):
            return "other models are taking turns just now"
        tasks.create_task(self._do(switch))
        return ""

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())

    def _see(self, stages: ModelStages, members: Members, now: float) -> None:
        """Notes what is known of a model's engine; nothing while there is none."""
        model = self._model(stages.name)
        found = [members.get(Kind.ENGINE, stages.replica_id(number)) for number in stages.engines]
        member = next((each for each in found if each is not None), None)
        if member is None or member.load is None:
            if model.engine is not None:
                model.engine = None
                model.lost_at = now
            return
        load = self._loads.get((member.replica_id, member.epoch), member.load)
        known = model.engine
        if known is not None and known.epoch == member.epoch:
            known.load = load
            if known.is_awake == load.is_awake or self._policy.is_switching:
                known.agreed_at = now
            elif now - known.agreed_at > DOUBT_SECONDS:
                known.is_awake = load.is_awake
                model.asleep_since = now
        else:
            model.engine = _Engine(member.address, member.epoch, load, load.is_awake, now)
            model.asleep_since = now
        model.num_bytes = load.num_releasable_bytes
        model.lost_at = None
        self._policy.note_costs(stages.name, load.wake_seconds)
        if model.engine is not None and model.engine.is_awake:
            model.woken_by_hand_at = None

    def _sight(self, name: str, demand: Demand, now: float) -> ModelSight:
        model = self._model(name)
        engine = model.engine
        if engine is None:
            # There is none to wake: the supervisor starts it again.
            is_starting = model.needs_room_to_start(now) and (bool(demand) or model.is_pinned)
            return ModelSight(
                name=name,
                num_bytes=model.num_bytes if is_starting else 0,
                is_awake=is_starting,
                is_pinned=is_starting,
            )
        is_left_alone = now < model.retry_at
        waiting = dict(demand)
        if not engine.is_awake:
            if _has_work(engine.load):
                waiting |= {
                    tenant: Waiting(model.asleep_since, weight)
                    for tenant, weight in engine.load.tenants.items()
                }
            if model.woken_by_hand_at is not None:
                waiting[OPERATOR] = Waiting(model.woken_by_hand_at)
        return ModelSight(
            name=name,
            num_bytes=model.num_bytes,
            is_awake=engine.is_awake,
            has_work=_has_work(engine.load),
            is_pinned=model.is_pinned or is_left_alone,
            tenants=engine.load.tenants,
            waiting={} if is_left_alone else waiting,
        )

    async def _do(self, switch: Switch) -> None:
        """Carries a switch out. A model whose engine fails is left alone for a moment, so that
        others are chosen."""
        self._waking = switch.wakes
        try:
            for name in switch.sleeps:
                await self._put_to_sleep(name)
            if switch.wakes:
                await self._wake_up(switch.wakes)
        except EngineCallFailed as failed:
            self._report(f"turn of {switch.wakes or 'no model'}: {failed}")
        finally:
            self._waking = ""
            self._policy.note_switch(switch, self._clock())
            self.on_change()

    async def _put_to_sleep(self, name: str) -> None:
        model = self._model(name)
        if (engine := model.engine) is None:
            return
        # Before the call: a request that comes meanwhile is no reason to choose this engine.
        engine.is_awake = False
        model.asleep_since = self._clock()
        try:
            await self._engines.sleep(engine.address)
        except EngineCallFailed:
            # The memory of an engine that is still falling asleep is not free.
            engine.is_awake = await self._state_after_failure(model, engine, AWAKE) != ASLEEP
            raise

    async def _wake_up(self, name: str) -> None:
        model = self._model(name)
        if (engine := model.engine) is None:
            return
        try:
            await self._engines.wake(engine.address)
            engine.is_awake = True
        except EngineCallFailed:
            engine.is_awake = await self._state_after_failure(model, engine, ASLEEP) == AWAKE
            raise

    async def _state_after_failure(self, model: _Model, engine: _Engine, otherwise: str) -> str:
        """State of the engine as it says itself after a call that failed: a call that took too
        long may have been obeyed. `otherwise`: where it does not answer."""
        try:
            # The model may have lost it meanwhile.
            load = (await self._engines.described(engine.address)).load
        except EngineCallFailed:
            return otherwise
        finally:
            model.retry_at = self._clock() + RETRY_SECONDS
        return otherwise if load is None else load.sleep_state or AWAKE


def _has_work(load: ReplicaLoad) -> bool:
    return load.num_running + load.num_waiting > 0


def demand_of(words: Sequence[tuple[events_pb2.Demand, float]]) -> Demand:
    """Tenants that wait for a model, from each gateway's message and the time at which it came."""
    found: dict[str, Waiting] = {}
    for word, at in words:
        for each in word.tenants:
            since = at - each.waited_seconds
            known = found.get(each.tenant)
            if known is None or since < known.since:
                found[each.tenant] = Waiting(since, each.weight or 1.0)
    return found
