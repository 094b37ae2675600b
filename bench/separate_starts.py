"""Deployments of one model each on a device that does not have room for all: how models that take
no turns share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

Start = Callable[[str, ExitStack], str]
"""Starts the deployment of a model, which the stack ends; its address."""


@dataclass(slots=True, eq=False)
class _Deployment:
    """A deployment of one model. `address` comes when it has started."""

    stack: ExitStack = field(default_factory=ExitStack)
    num_requests: int = 0
    used_at: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    address: asyncio.Task[str] | None = None


class SeparateStarts:
    """Deployments of one model each, as many as memory holds. One that is asked for is started, one
    at a time; the least recently used ones end, behind their last request, where it needs their
    memory."""

    def __init__(self, start: Start, sizes: Mapping[str, int], most_bytes: int) -> None:
        """`sizes`: bytes of each model."""
        self._start = start
        self._sizes = sizes
        self._most_bytes = most_bytes
        self._deployments: dict[str, _Deployment] = {}
        self._starting = asyncio.Lock()
        self._is_over = False

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[str]:
        """Scope of a request: inside, a deployment of the model answers at the address."""
        if (found := self._deployments.get(model)) is None:
            found = self._deployments[model] = _Deployment()
            found.address = asyncio.create_task(self._started(model, found))
        assert found.address is not None
        found.num_requests += 1
        found.used_at = time.monotonic()
        found.idle.clear()
        try:
            # Shielded: other requests wait for the same start.
            yield await asyncio.shield(found.address)
        finally:
            found.num_requests -= 1
            found.used_at = time.monotonic()
            if not found.num_requests:
                found.idle.set()

    async def fill(self, models: Iterable[str]) -> None:
        """Starts deployments of models in this order, as many as memory holds."""
        for model in models:
            if self._taken_bytes() + self._sizes[model] > self._most_bytes:
                return
            async with self.use(model):
                pass

    async def close(self) -> None:
        """Ends all deployments."""
        self._is_over = True
        async with self._starting:
            for each in self._deployments.values():
                await asyncio.to_thread(each.stack.close)

    async def _started(self, model: str, deployment: _Deployment) -> str:
        async with self._starting:
            if self._is_over:
                return ""
            while self._taken_bytes() + self._sizes[model] > self._most_bytes:
                running = [each for each in self._deployments if self._runs(each)]
                oldest = min(running, key=self._order)
                leaving = self._deployments.pop(oldest)
                await leaving.idle.wait()
                await asyncio.to_thread(leaving.stack.close)
            return await asyncio.to_thread(self._start, model, deployment.stack)

    def _order(self, model: str) -> tuple[bool, float]:
        """Deployments end in ascending order."""
        deployment = self._deployments[model]
        return deployment.num_requests > 0, deployment.used_at

    def _runs(self, model: str) -> bool:
        address = self._deployments[model].address
        return address is not None and address.done()

    def _taken_bytes(self) -> int:
        return sum(self._sizes[model] for model in self._deployments if self._runs(model))
