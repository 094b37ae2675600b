"""A device in the simulation: memory that engines take and give back, and calls that reach them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headwater.engine_core.executor import MemoryShort, ReleasableMemory
from headwater.engine_core.step_output import EngineLoad
from headwater.services.runtime.errors import HeadwaterError
from headwater.services.runtime.member import Member
from headwater.services.stack.engine_calls import EngineCallFailed
from tests.simulation.simulated_engine import SimulatedEngine


@dataclass
class Device:
    """`capacity`: bytes."""

    capacity: int
    rng: random.Random
    used: dict[str, int] = field(default_factory=dict)
    """Bytes that each living engine has."""
    taken_share: float = 0.0
    """Share of wakes that find memory which another process took."""
    num_short: int = 0

    def take(self, owner: str, num_bytes: int) -> None:
        """Raises `MemoryShort`."""
        free = self.capacity - sum(self.used.values())
        if self.rng.random() < self.taken_share:
            free = 0
        if num_bytes > free:
            self.num_short += 1
            raise MemoryShort(num_bytes, free)
        self.used[owner] = num_bytes

    def memory_of(self, owner: str) -> Callable[[ReleasableMemory], ReleasableMemory]:
        """Memory of an engine that starts awake."""

        def made(memory: ReleasableMemory) -> ReleasableMemory:
            self.used[owner] = memory.num_bytes
            return EngineMemory(self, owner, memory)

        return made


class EngineMemory:
    """See `ReleasableMemory`."""

    def __init__(self, device: Device, owner: str, memory: ReleasableMemory) -> None:
        self.keeps_cache = memory.keeps_cache
        self.num_bytes = memory.num_bytes
        self._device = device
        self._owner = owner
        self._memory = memory

    def release(self) -> int:
        self._device.used[self._owner] = 0
        return self._memory.release()

    def restore(self) -> None:
        self._device.take(self._owner, self.num_bytes)
        self._memory.restore()


class SimulatedCalls:
    """See `EngineCalls`."""

    def __init__(self, find: Callable[[str], SimulatedEngine | None]) -> None:
        self._find = find

    async def sleep(self, address: str) -> int:
        engine = self._reached(address)
        return (await _answered(engine, engine.sleep_calls.sleep())).num_released_bytes

    async def wake(self, address: str) -> None:
        engine = self._reached(address)
        await _answered(engine, engine.sleep_calls.wake())

    async def described(self, address: str) -> Member:
        return self._reached(address).facts.describe()

    def _reached(self, address: str) -> SimulatedEngine:
        engine = self._find(address)
        if engine is None:
            raise EngineCallFailed("connection refused")
        return engine


async def _answered(engine: SimulatedEngine, call: Coroutine[Any, Any, EngineLoad]) -> EngineLoad:
    """The answer of an engine. Its connection breaks when it dies."""
    called = asyncio.ensure_future(call)
    died = asyncio.ensure_future(engine.died.wait())
    try:
        await asyncio.wait((called, died), return_when=asyncio.FIRST_COMPLETED)
        if not called.done():
            raise EngineCallFailed("connection lost")
        return called.result()
    except HeadwaterError as failed:
        raise EngineCallFailed(str(failed)) from failed
    finally:
        called.cancel()
        died.cancel()
