"""Bounds the calls that clients have open at once over gRPC, where one connection carries any
number of them."""

from __future__ import annotations

import asyncio

from headwater.services.runtime import errors

from ..request.admission import Admission


class OpenCalls:
    """Counts open calls. The tenant that has most of them leaves the last sixteenth to others, as
    in the queue."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._of_tenants = Admission(max_calls, 0)
        self._without_key = Admission(max_calls, 0)

    def count(self, tenant: str | None) -> None:
        """Counts the call of the current task, to the task's end; also one whose message never
        comes. None: a call that needs no key, such as those of health, which take no tenant's
        place. Raises `LimitExceeded`."""
        calls = self._of_tenants if tenant is not None else self._without_key
        turn = calls.try_take("", tenant or "")
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
