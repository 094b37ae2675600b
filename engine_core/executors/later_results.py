"""Retires the plans of a rank in a thread, so that the next plan is launched while a device computes this one."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

from ..executor import Executor, StepResult


class LaterResults:
    """Waits for plans in their order. What it cannot retire ends the process: the device is of no use any more."""

    def __init__(self, executor: Executor, take: Callable[[StepResult, float], None]) -> None:
        """`take` is given each result and the seconds that the device had for its plan alone."""
        self._executor, self._take = executor, take
        self._launched: SimpleQueue[tuple[int, float]] = SimpleQueue()
        threading.Thread(target=self._retire_all, name="results", daemon=True).start()

    def add(self, handle: int, launched_at: float) -> None:
        self._launched.put((handle, launched_at))

    def _retire_all(self) -> None:
        last = 0.0
        try:
            while True:
                handle, launched_at = self._launched.get()
                result = self._executor.retire(handle)
                now = time.perf_counter()
                self._take(result, now - max(launched_at, last))
                last = now
        except BaseException:
            # No other thread retires plans: whatever ends this one, the rank would wait for ever.
            traceback.print_exc()
            os._exit(1)
