"""Bounds the calls that clients have open at once over gRPC, where a client opens any number of
connections."""

from __future__ import annotations

import asyncio

from headwater.services.runtime import errors

from ..request.admission import Admission


class OpenCalls:
    """Counts open calls. The tenant that has most of them leaves the last sixteenth to others, as
    in the queue; of calls that need no key, such as those of health, the client does that has most.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._of_tenants = Admission(max_calls, 0)
        self._without_key = Admission(max_calls, 0)

    def count(self, tenant: str) -> None:
        """Counts the call of the current task until the task ends, also if the call's message never
        arrives. Raises `LimitExceeded`."""
        self._count(self._of_tenants, tenant)

    def count_without_key(self, peer: str) -> None:
        """Counts as `count` does, for the client of a call that takes no tenant's place."""
        self._count(self._without_key, peer)

    def _count(self, calls: Admission, owner: str) -> None:
        turn = calls.try_take("", owner)
        if turn is None:
            raise errors.LimitExceeded(
                f"{calls.num_running} calls are open over gRPC; allowed: {self._max_calls}, "
                "twice --max-running and "
                "--max-queued",
                retry_after=1.0,
            )
        # Nothing waits to be computed here.
        turn.started()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: turn.release())
