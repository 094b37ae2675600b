"""Measures the seconds until all processes agree again after the death of an engine, of Redis and
of NATS."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tests.simulation.cluster.clients import Tally
from tests.simulation.cluster.processes import ENGINE, NATS, REDIS, Cluster
from tests.simulation.cluster.trial import TENANTS, ClusterFailed, Trials
from tests.simulation.cluster.views import NotReached, Views

AWAY_SECONDS = 2.0
"""Seconds for which a server is away under load."""
GIVE_UP_SECONDS = 30.0
POLL_SECONDS = 0.02


class Convergence:
    """Breaks one thing at a time while questions are sent."""

    def __init__(self, cluster: Cluster, views: Views, trials: Trials) -> None:
        self._cluster = cluster
        self._views = views
        self._trials = trials
        self.tally = Tally()
        """Statistics of all questions."""

    async def measure(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each round, by the thing that was broken. Raises `ClusterFailed` where the
        processes do not agree again."""
        kinds: dict[str, Callable[[], Awaitable[float]]] = {
            "index after an engine's restart": self._engine,
            "index after Redis came back empty": lambda: self._servers(REDIS),
            "index after NATS came back": lambda: self._servers(NATS),
            "index after both came back": lambda: self._servers(REDIS, NATS),
            "fairness after Redis came back empty": self._fairness,
        }
        return {
            kind: [round(await once(), 3) for _ in range(rounds)] for kind, once in kinds.items()
        }

    async def _engine(self) -> float:
        """Seconds from the first answer of the new engine to agreement; questions go on to the
        others."""
        [name, *_] = self._cluster.names(ENGINE)
        before = await self._views.engine(name)
        async with self._load():
            self._cluster.kill(name)
            while (await self._epoch(name)) in (None, before.epoch):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(POLL_SECONDS)
            back = time.monotonic()
            while not await self._is_known(name):
                self._give_up(back, f"the new life of {name} is not known")
                await asyncio.sleep(POLL_SECONDS)
        seconds = time.monotonic() - back
        await self._agreement(time.monotonic())
        return seconds

    async def _servers(self, *names: str) -> float:
        """Seconds from the last server's first answer to agreement, while no question is sent."""
        servers = [self._cluster.servers[name] for name in names]
        async with self._load():
            for server in servers:
                await server.kill()
            await asyncio.sleep(AWAY_SECONDS)
        # Requests under way when the servers come back are over soon.
        for server in servers:
            await server.start()
        return await self._agreement(time.monotonic())

    async def _fairness(self) -> float:
        """Seconds from Redis's first answer until it knows every tenant's virtual time, while all
        tenants send requests."""
        server = self._cluster.servers[REDIS]
        async with self._load(), self._trials.eager_ones():
            await server.kill()
            await asyncio.sleep(AWAY_SECONDS)
            await server.start()
            back = time.monotonic()
            while missing := TENANTS.keys() - await self._shared():
                self._give_up(back, f"Redis does not know of {missing}")
                await asyncio.sleep(POLL_SECONDS)
            return time.monotonic() - back

    async def _shared(self) -> set[str]:
        try:
            return set(await self._views.shared_times())
        except NotReached:
            return set()

    @contextlib.asynccontextmanager
    async def _load(self) -> AsyncIterator[None]:
        """Sends questions for the length of a scope; all of them are answered within it."""
        stopping = asyncio.Event()
        task = asyncio.create_task(self._trials.ask_until(stopping, self.tally))
        try:
            yield
        finally:
            stopping.set()
            await task

    async def _epoch(self, name: str) -> int | None:
        try:
            return (await self._views.engine(name)).epoch
        except NotReached:
            return None

    async def _is_known(self, name: str) -> bool:
        """Whether every gateway and Redis know an engine."""
        try:
            return await self._views.is_known(name)
        except NotReached:
            return False

    async def _agreement(self, since: float) -> float:
        while disagreements := await self._views.disagreements():
            self._give_up(since, "; ".join(disagreements))
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - since

    @staticmethod
    def _give_up(since: float, reason: str) -> None:
        if time.monotonic() - since > GIVE_UP_SECONDS:
            raise ClusterFailed([reason])
