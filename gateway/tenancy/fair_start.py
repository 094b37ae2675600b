"""The order in which requests begin that came at once: one in each pass of the event loop, tenants
in turn.

A request that begins is decoded, checked and sent on before the loop sees to anything else. Of
thousands that come at once, those of one tenant would otherwise begin in one pass, and answers of
others stand still meanwhile. Knows nothing about what a request costs later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

BESIDE_SECONDS = 1.0
"""Seconds for which a tenant counts as there after a request of it."""
MAX_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Begin:
    tenant: str | None
    at: float
    thread_seconds: float
    """Processor seconds of the event loop's thread."""


class FairStart:
    """One of a gateway, for all surfaces.

    A tenant whose requests wait alone, beside others that are there, leaves half of the loop's time
    to these: its next request begins when the loop has rested for as long as it has worked since
    the last one.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests that have not begun, by tenant; the tenant whose turn is next comes first."""
        self._has_begun = False
        """Whether a request began in this pass of the event loop."""
        self._last = _Begin(None, 0.0, 0.0)
        self._changed_at = float("-inf")
        """Time of the last request that another tenant's came before."""
        self._pause: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def begin_at_once(self, tenant: str) -> bool:
        """Whether a request may begin now, which then counts as begun: none waits, and none has
        begun in this pass."""
        if self._has_begun or self._waiting:
            return False
        self._begin(tenant)
        return True

    async def wait(self, tenant: str) -> None:
        """Returns when a request may begin that may not at once."""
        start = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(start)
        if self._pause is not None and tenant != self._last.tenant:
            self._pause.cancel()
            self._let_next()
        await start

    def _begin(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._last.tenant not in (None, tenant):
            self._changed_at = now
        self._last = _Begin(tenant, now, time.thread_time())
        self._has_begun = True
        loop.call_soon(self._let_next)

    def _let_next(self) -> None:
        self._has_begun = False
        self._pause = None
        last = self._last.tenant
        while self._waiting:
            if last in self._waiting:
                # Also where its queue was the first when it had to pause.
                self._waiting[last] = self._waiting.pop(last)
            tenant = next(iter(self._waiting))
            if tenant == last and (seconds := self._seconds_to_rest()) > 0:
                self._pause = asyncio.get_running_loop().call_later(seconds, self._let_next)
                return
            queue = self._waiting.pop(tenant)
            start = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            # A client that has left meanwhile does not take its tenant's turn.
            if not start.done():
                start.set_result(None)
                self._begin(tenant)
                return

    def _seconds_to_rest(self) -> float:
        """Seconds until the tenant that began last may begin again."""
        now = asyncio.get_running_loop().time()
        if now - self._changed_at > BESIDE_SECONDS:
            return 0.0
        worked = time.thread_time() - self._last.thread_seconds
        return self._last.at + min(2 * worked, MAX_PAUSE_SECONDS) - now
