"""Seeded sleeps, wakes, kills and failures of engines that take turns: every answer has its tokens,
and no process holds anything afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from hashlib import blake2b

from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.stack.engine_calls import EngineCallFailed
from headwater.services.stack.model_turns import RETRY_SECONDS
from tests.simulation.turns.cluster import TurnsCluster
from tests.simulation.turns.device import SimulatedCalls
from tests.simulation.virtual_loop import run_virtually

MODELS = ("a", "b", "c")
NUM_REQUESTS = 14
NUM_FAULTS = 10
FAULT_SECONDS = 12.0
"""Seconds within which requests and faults come."""
SETTLE_SECONDS = 4.0


class Faults:
    """Faults of a cluster, one after another at random times."""

    def __init__(self, cluster: TurnsCluster) -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._calls = SimulatedCalls(cluster.engines.get)

    async def one(self, after: float) -> None:
        await asyncio.sleep(after)
        faults = (
            *(self._sleep_by_hand, self._wake_by_hand, self._pin, self._kill),
            *(self._hang, self._cancelled_wake, self._full_device, self._cancelled_request),
        )
        fault = self._rng.choice(faults)
        name = self._rng.choice(self._cluster.models)
        self._cluster.note(f"{fault.__name__} {name}")
        await fault(name)

    async def _sleep_by_hand(self, name: str) -> None:
        supervisor = self._cluster.supervisor
        supervisor.turns.sleep(name, supervisor.tasks)

    async def _wake_by_hand(self, name: str) -> None:
        self._cluster.supervisor.turns.wake(name)

    async def _pin(self, name: str) -> None:
        turns = self._cluster.supervisor.turns
        if not turns.pin(name, is_pinned=True):
            await asyncio.sleep(self._rng.uniform(0.5, 3))
            turns.pin(name, is_pinned=False)

    async def _kill(self, name: str) -> None:
        if f"engine-{name}" in self._cluster.engines:
            await self._cluster.kill_engine(name)
            await asyncio.sleep(self._rng.uniform(0.2, 2.0))
            await self._cluster.start_engine(name)

    async def _hang(self, name: str) -> None:
        if (engine := self._cluster.engines.get(f"engine-{name}")) is not None:
            engine.pause()
            await asyncio.sleep(self._rng.uniform(0.2, 2.0))
            engine.resume()

    async def _cancelled_wake(self, name: str) -> None:
        """A call to wake, which its caller leaves and another call follows that puts the engine to
        sleep again."""
        with contextlib.suppress(EngineCallFailed, TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.01, 0.2)):
                await self._calls.wake(f"engine-{name}")
        with contextlib.suppress(EngineCallFailed):
            await self._calls.sleep(f"engine-{name}")

    async def _full_device(self, name: str) -> None:
        """Another process takes the device's memory for a time."""
        self._cluster.device.taken_share = self._rng.choice((0.5, 1.0))
        await asyncio.sleep(self._rng.uniform(0.5, 3.0))
        self._cluster.device.taken_share = 0.0

    async def _cancelled_request(self, name: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.1, 2.0)):
                await self._cluster.ask(name, Tenant(id="z"), 60)


async def _run(seed: int) -> TurnsCluster:
    cluster = TurnsCluster(seed, MODELS)
    rng = cluster.rng
    faults = Faults(cluster)

    async def request(after: float) -> None:
        await asyncio.sleep(after)
        tenant = Tenant(id=rng.choice("xyz"))
        asked = await cluster.ask(rng.choice(MODELS), tenant, rng.randrange(2, 60))
        cluster.note(f"request {asked.answer.number}: {asked.answer.replicas}")

    async with cluster.running():
        async with asyncio.timeout(300):
            times = [rng.uniform(0, FAULT_SECONDS) for _ in range(NUM_REQUESTS + NUM_FAULTS)]
            await asyncio.gather(
                *map(request, times[:NUM_REQUESTS]), *map(faults.one, times[NUM_REQUESTS:])
            )
        await asyncio.sleep(SETTLE_SECONDS + RETRY_SECONDS)
        cluster.check_answers()
        cluster.check_engines()
        assert not any(gateway.cold_starts.waiting.values() for gateway in cluster.gateways)
    return cluster


def run_seed(seed: int) -> str:
    """Runs a seed, and returns a digest of what happened. Raises `AssertionError`."""
    story = run_virtually(_run(seed), seed).story
    return blake2b("\n".join(story).encode(), digest_size=8).hexdigest()
