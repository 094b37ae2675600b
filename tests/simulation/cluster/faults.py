"""Faults of a cluster: a schedule that a seed determines, and its execution.

Real processes take their own time; the seed determines the faults, not the reaction of the cluster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.simulation.cluster.processes import (
    ENGINE,
    GATEWAY,
    NATS,
    OUTPUT_PROCESSOR,
    PROCESSOR,
    REDIS,
    Cluster,
    Shape,
)
from tests.simulation.cluster.relay import NatsRelay

NUM_FAULTS = 3
SPAN_SECONDS = 2.0
"""Seconds within which faults begin."""
LEAST_SECONDS = 0.3
MOST_SECONDS = 2.0
"""Least and largest number of seconds of a fault. Past ten seconds a held connection counts as
gone; that takes a schedule of its own."""
SLOW_SECONDS = 0.05
SUDDEN = frozenset({"kill", "kill_core"})
DEADLY = SUDDEN | {"terminate"}
"""Faults after which a process comes back as another life."""

KINDS: dict[str, tuple[str, ...]] = {
    "kill": (ENGINE, OUTPUT_PROCESSOR, PROCESSOR, GATEWAY),
    "kill_core": (ENGINE,),
    "terminate": (ENGINE, OUTPUT_PROCESSOR, PROCESSOR, GATEWAY),
    "pause": (ENGINE, OUTPUT_PROCESSOR, PROCESSOR, GATEWAY, NATS, REDIS),
    "cut": (ENGINE, OUTPUT_PROCESSOR, NATS, REDIS),
    "slow": (ENGINE, OUTPUT_PROCESSOR, NATS, REDIS),
    "storm": (NATS,),
    "empty_redis": (REDIS,),
    "empty_nats": (NATS,),
    "empty_both": (REDIS,),
}
"""Kinds of faults, each with the stages that it may hit."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    target: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:.2f} s: {self.kind} {self.target} for {self.seconds:.2f} s"


def schedule(seed: int, shape: Shape) -> list[Fault]:
    """The faults of a seed, in order. No process gets two of them, and of each kind of stage at
    least one process gets none.

    At most one engine is killed: a request that is on two killed engines before its first token
    counts as their cause, and is refused.
    """
    rng = random.Random(seed)
    able = {kind: rng.sample(names := shape.names(kind), len(names) - 1) for kind in _STAGES}
    able |= {NATS: [NATS], REDIS: [REDIS]}
    pairs = [(kind, befallen) for kind, each in KINDS.items() for befallen in each]
    chosen: list[Fault] = []
    has_died = False
    while len(chosen) < NUM_FAULTS:
        kind, befallen = rng.choice(pairs)
        is_sudden = befallen == ENGINE and kind in SUDDEN
        if (
            not able[befallen]
            or (kind == "empty_both" and not able[NATS])
            or (is_sudden and has_died)
        ):
            continue
        has_died |= is_sudden
        target = able[befallen].pop()
        if kind == "empty_both":
            able[NATS].clear()
        at = rng.uniform(0, SPAN_SECONDS)
        seconds = rng.uniform(LEAST_SECONDS, MOST_SECONDS)
        chosen.append(Fault(round(at, 3), kind, target, round(seconds, 3)))
    return sorted(chosen, key=lambda fault: fault.at)


_STAGES = (ENGINE, OUTPUT_PROCESSOR, PROCESSOR, GATEWAY)


class Breaker:
    """Executes faults; each is over when its method returns."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def carry_out(self, faults: list[Fault], seed: int) -> None:
        """Executes a schedule. Returns when the last fault is over."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(self._carry_out(fault, random.Random(seed)))

    async def _carry_out(self, fault: Fault, rng: random.Random) -> None:
        await asyncio.sleep(fault.at)
        if fault.kind == "storm":
            await self._storm(rng, fault.seconds)
        else:
            methods: dict[str, Callable[[str, float], Awaitable[None]]] = {
                "kill": self._kill,
                "kill_core": self._kill_core,
                "terminate": self._terminate,
                "pause": self._pause,
                "cut": self._cut,
                "slow": self._slow,
                "empty_redis": self._empty,
                "empty_nats": self._empty,
                "empty_both": self._empty_both,
            }
            await methods[fault.kind](fault.target, fault.seconds)

    async def _kill(self, name: str, seconds: float) -> None:
        self._cluster.kill(name)

    async def _kill_core(self, name: str, seconds: float) -> None:
        self._cluster.kill_core(name)

    async def _terminate(self, name: str, seconds: float) -> None:
        self._cluster.terminate(name)

    async def _pause(self, name: str, seconds: float) -> None:
        stopped = self._cluster.pause(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._cluster.go_on(stopped)

    async def _cut(self, name: str, seconds: float) -> None:
        relay = self._cluster.relays[name]
        relay.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            relay.mend()

    async def _slow(self, name: str, seconds: float) -> None:
        relay = self._cluster.relays[name]
        relay.delay = SLOW_SECONDS
        try:
            await asyncio.sleep(seconds)
        finally:
            relay.delay = 0.0

    async def _storm(self, rng: random.Random, seconds: float) -> None:
        relay = self._cluster.relays[NATS]
        assert isinstance(relay, NatsRelay)
        relay.storm = rng
        try:
            await asyncio.sleep(seconds)
        finally:
            relay.storm = None

    async def _empty(self, name: str, seconds: float) -> None:
        server = self._cluster.servers[name]
        await server.kill()
        await asyncio.sleep(seconds)
        await server.start()

    async def _empty_both(self, name: str, seconds: float) -> None:
        await asyncio.gather(self._empty(REDIS, seconds), self._empty(NATS, seconds))
