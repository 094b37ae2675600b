"""The pace at which calls over gRPC are refused. A client that calls again as soon as it is refused
would otherwise take the gateway's time with refusals alone."""

from __future__ import annotations

import asyncio

EACH_SECONDS = 0.01
"""Seconds between two refusals of one caller, after the first ones."""
AT_ONCE = 20
"""Refusals of a caller that come at once."""
MAX_WAIT_SECONDS = 1.0
MAX_HELD = 1024
"""Refusals that wait, of all callers; further ones come at once."""
MAX_CALLERS = 4096


class RefusalPace:
    """Lets refused calls wait, a hundred of each caller a second: a connection has 128 calls at
    once, and no more until these have ended."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        """Time of the next refusal by caller, on the event loop's clock."""
        self._num_held = 0

    async def wait(self, caller: str) -> None:
        """Returns when the caller may be refused."""
        now = asyncio.get_running_loop().time()
        if len(self._next) > MAX_CALLERS:
            self._next = {name: at for name, at in self._next.items() if at > now}
        at = max(self._next.get(caller, 0.0), now - AT_ONCE * EACH_SECONDS)
        self._next[caller] = min(at, now + MAX_WAIT_SECONDS) + EACH_SECONDS
        if at <= now or self._num_held >= MAX_HELD:
            return
        self._num_held += 1
        try:
            await asyncio.sleep(min(at - now, MAX_WAIT_SECONDS))
        finally:
            self._num_held -= 1
