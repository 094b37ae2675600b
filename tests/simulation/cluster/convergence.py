"""How soon everyone knows everything again: after an engine's, Redis's and NATS's death, in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tests.simulation.cluster.clients import Tally
from tests.simulation.cluster.line import ENGINE, NATS, REDIS, Cluster
from tests.simulation.cluster.trial import TENANTS, ClusterFailed, Trials
from tests.simulation.cluster.views import NotReached, Views

AWAY_SECONDS = 2.0
"""Of a server, under load."""
GIVE_UP_SECONDS = 30.0
POLL_SECONDS = 0.02


class Convergence:
    """Breaks one thing at a time, while questions come."""

    def __init__(self, cluster: Cluster, views: Views, trials: Trials) -> None:
        self._cluster, self._views, self._trials = cluster, views, trials
        self.tally = Tally()
        """Of everything that was asked meanwhile."""

    async def measure(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each round, by what was broken. Raises `ClusterFailed` where nobody agrees again."""
        kinds: dict[str, Callable[[], Awaitable[float]]] = {
            "index after an engine's restart": self._engine,
            "index after Redis came back empty": lambda: self._servers(REDIS),
            "index after NATS came back": lambda: self._servers(NATS),
            "index after both came back": lambda: self._servers(REDIS, NATS),
            "fairness after Redis came back empty": self._fairness,
        }
        return {kind: [round(await once(), 3) for _ in range(rounds)] for kind, once in kinds.items()}

    async def _engine(self) -> float:
        """From when the new life answers; questions go on to the others."""
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
        """From when the last server answers, to when everyone agrees while nothing is asked."""
        servers = [self._cluster.servers[name] for name in names]
        async with self._load():
            for server in servers:
                await server.kill()
            await asyncio.sleep(AWAY_SECONDS)
        # What is under way when the servers come back is over soon.
        for server in servers:
            await server.start()
        return await self._agreement(time.monotonic())

    async def _fairness(self) -> float:
        """From when Redis answers to when it knows every tenant's virtual time, while all of them ask."""
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
        """Questions for the length of a scope; what was asked is answered within it."""
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
        """To every gateway, and in Redis."""
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
