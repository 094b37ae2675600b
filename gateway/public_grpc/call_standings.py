"""State of the tenant's limits for each open call: shared by the handler of the call and the code
that counts its refusal."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from ..tenancy.grant import Standing


class CallStandings:
    """One for a listener. NOTE: handlers and interceptors run in the call's own task (grpcio
    1.85)."""

    def __init__(self) -> None:
        self._of_tasks: WeakKeyDictionary[asyncio.Task[object], Standing] = WeakKeyDictionary()

    def of_this_call(self) -> Standing:
        task = asyncio.current_task()
        assert task is not None
        return self._of_tasks.setdefault(task, Standing())
