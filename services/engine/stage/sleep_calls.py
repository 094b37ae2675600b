"""Calls of an engine's core to sleep and to wake, and where it stands between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headwater.engine_core.sleep import SleepState
from headwater.engine_core.step_output import EngineLoad

from ...runtime.errors import BadRequest, Unavailable
from ..core.messages import Command, Sleep, Wake

WAKING = "waking"
"""State of an engine that was called to wake, beside those of `SleepState`."""


class SleepCalls:
    def __init__(self, send: Callable[[Command], None], load: Callable[[], EngineLoad]) -> None:
        """`send`: to the core. `load`: what the core reported last."""
        self._send = send
        self._load = load
        self._wanted = SleepState.AWAKE
        self._num_calls = 0
        self._reported = asyncio.Event()

    @property
    def state(self) -> str:
        """The engine's sleep state, as it will be after the calls that its core has yet to take."""
        reported = self._load().sleep_state
        if reported == self._wanted:
            return reported
        return WAKING if self._wanted is SleepState.AWAKE else SleepState.FALLING_ASLEEP

    @property
    def is_awake(self) -> bool:
        return self.state == SleepState.AWAKE

    async def sleep(self) -> EngineLoad:
        """Returns once memory is given back. Raises `BadRequest` where the engine was not started
        for it, and `Unavailable` where a later call came meanwhile."""
        BadRequest.unless(self._load().can_sleep, "takes_turns", False, "true")
        return await self._call(Sleep, SleepState.ASLEEP)

    async def wake(self) -> EngineLoad:
        """Returns once the engine computes. Raises `Unavailable` where its device lacks the memory,
        or where a later call came meanwhile."""
        return await self._call(Wake, SleepState.AWAKE)

    def on_report(self) -> None:
        """Notes that the core has reported its load."""
        reported = self._reported
        self._reported = asyncio.Event()
        reported.set()

    async def _call(self, of: Callable[[int], Command], wanted: SleepState) -> EngineLoad:
        self._num_calls += 1
        call = self._num_calls
        self._wanted = wanted
        self._send(of(call))
        while (load := self._load()).sleep_call < call or load.sleep_state != wanted:
            await self._reported.wait()
            if self._num_calls != call:
                raise Unavailable(f"a later call wants the engine {self._wanted}")
            if self._load().sleep_problem and self._load().sleep_call == call:
                self._wanted = SleepState.ASLEEP
                raise Unavailable(self._load().sleep_problem, code="no_memory")
        return load
