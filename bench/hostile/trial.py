"""The neighbour alone, then beside each hostile body in turn, on a deployment that runs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np

from headwater.services.stack.cluster_record import ClusterRecord

from .attack import Target
from .attacker import attack, prepare
from .neighbour import Latencies, Neighbour
from .tenants import Tenants

WARM_UP_SECONDS = 5.0
"""Seconds in which a new deployment starts its checkers of grammars."""
ALONE_EACH = 6
"""Number of bodies between two stretches in which nothing attacks: the machine's own load changes
meanwhile."""
SETTLE_SECONDS = 20.0
"""Most seconds for the deployment to serve the neighbour as before."""
SETTLED_RATIO = 2.0
"""The neighbour is served as before when it waits at most so many times its median alone."""


@dataclass(slots=True)
class Beside:
    """One stretch of the neighbour beside a body."""

    answers: Counter[str]
    """Number of answers that the hostile tenant got, by status."""
    latencies: Latencies
    settled_seconds: float | None
    """Seconds after the end of the attack until the neighbour was served as before; None: it was
    not within `SETTLE_SECONDS`."""


@dataclass(slots=True)
class Measured:
    alone: list[Latencies] = field(default_factory=list)
    """Latencies in intervals without an attack."""
    beside: dict[str, list[Beside]] = field(default_factory=dict)
    """Stretches beside each body, by its name."""

    def add(self, other: Measured) -> None:
        self.alone += other.alone
        for name, stretches in other.beside.items():
            self.beside.setdefault(name, []).extend(stretches)


class Trial:
    """NOTE: each body comes from a new tenant, since an earlier one would have used the requests of
    the minute."""

    def __init__(
        self,
        cluster: ClusterRecord,
        admin_key: str,
        attacker: ProcessPoolExecutor,
        *,
        seconds: float,
        requests_per_minute: int,
    ) -> None:
        """`seconds` is the length of each stretch; `requests_per_minute` limits the hostile
        tenant."""
        self._cluster = cluster
        self._admin_key = admin_key
        self._attacker = attacker
        self._seconds = seconds
        self._requests_per_minute = requests_per_minute
        self._numbers = itertools.count()
        self.serves = True
        """Whether the neighbour is served again after the last body."""

    async def run(
        self,
        names: Sequence[str],
        measured: Measured,
        on_body: Callable[[str, Beside], None],
        end: float,
    ) -> int:
        """Adds to what is measured; calls `on_body` after each body. Returns the number of bodies
        that were measured or left out, since `end`, a time of the monotonic clock, was reached:
        fewer where the neighbour is not served any more, or an administrator gets no answer, so
        that the next body needs another deployment."""
        async with Tenants(self._cluster.rest, self._admin_key) as tenants:
            run = next(self._numbers)
            key = await tenants.add(f"neighbour-{run}")
            neighbour = Neighbour(self._cluster.rest, self._cluster.model, key)
            if run == 0:
                await neighbour.ask_for(WARM_UP_SECONDS)
            for number, name in enumerate(names):
                if time.monotonic() > end:
                    break
                if number % ALONE_EACH == 0:
                    measured.alone.append(await neighbour.ask_for(self._seconds))
                try:
                    beside = await self._beside(name, tenants, neighbour, measured.alone[0])
                except httpx.HTTPError:
                    if number == 0:
                        raise
                    self.serves = False
                    return number
                on_body(name, beside)
                measured.beside.setdefault(name, []).append(beside)
                if beside.settled_seconds is None:
                    self.serves = False
                    return number + 1
            measured.alone.append(await neighbour.ask_for(self._seconds))
        return len(names)

    async def _beside(
        self, name: str, tenants: Tenants, neighbour: Neighbour, alone: Latencies
    ) -> Beside:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._attacker, prepare, name, self._cluster.model)
        tenant = f"hostile-{name}"
        target = Target(
            rest=self._cluster.rest,
            grpc=self._cluster.grpc,
            model=self._cluster.model,
            key=await tenants.add(tenant, requests_per_minute=self._requests_per_minute),
        )
        attacking = loop.run_in_executor(self._attacker, attack, name, target, self._seconds)
        latencies = await neighbour.ask_for(self._seconds)
        answers = await attacking
        began = loop.time()
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await tenants.remove(tenant)
                await _settle(neighbour, alone)
        except (TimeoutError, httpx.HTTPError):
            return Beside(answers, latencies, None)
        return Beside(answers, latencies, loop.time() - began)


async def _settle(neighbour: Neighbour, alone: Latencies) -> None:
    """Returns when the neighbour is served as alone."""
    ttft = SETTLED_RATIO * float(np.median(alone.ttft))
    structured = SETTLED_RATIO * float(np.median(alone.structured))
    while True:
        seen = await neighbour.ask_once()
        if seen.ttft[0] <= ttft and seen.structured[0] <= structured:
            return
