"""The order in which requests begin that came at once: one in each pass of the event loop, tenants
in turn.

A request that begins is decoded, checked and sent on before the loop sees to anything else. Of
thousands that come at once, those of one tenant would otherwise begin in one pass, and answers of
others stand still meanwhile. Knows nothing about what a request costs later.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairStart:
    """One of a gateway, for all surfaces."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests that have not begun, by tenant; the tenant whose turn is next comes first."""
        self._has_begun = False
        """Whether a request began in this pass of the event loop."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def begin_at_once(self) -> bool:
        """Whether a request may begin now, which then counts as begun: none waits, and none has
        begun in this pass."""
        if self._has_begun or self._waiting:
            return False
        self._begin()
        return True

    async def wait(self, tenant: str) -> None:
        """Returns when a request may begin that may not at once."""
        start = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(start)
        await start

    def _begin(self) -> None:
        self._has_begun = True
        asyncio.get_running_loop().call_soon(self._let_next)

    def _let_next(self) -> None:
        self._has_begun = False
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            start = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            # A client that has left meanwhile does not take its tenant's turn.
            if not start.done():
                start.set_result(None)
                self._begin()
                return
