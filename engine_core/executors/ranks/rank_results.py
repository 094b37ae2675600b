"""Results of the plans of a rank: made at once, or in a thread, where the next plan is launched
while the device computes this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

from ...executor import Executor, StepResult
from ...system.worker_thread import start_worker

Take = Callable[[StepResult, float], None]


class ResultsAtOnce:
    """Retires each plan when it is submitted."""

    def __init__(self, executor: Executor, take: Take) -> None:
        """`take`: as `ResultThread` has it."""
        self._executor = executor
        self._take = take

    def add(self, handle: int, launched_at: float) -> None:
        self._take(self._executor.retire(handle), time.perf_counter() - launched_at)


class ResultThread:
    """Retires plans in their order, on its own thread. An error ends the process, since the device
    cannot be used any more."""

    def __init__(self, executor: Executor, take: Take) -> None:
        """`take` is given each result and the seconds that the device had for its plan alone."""
        self._executor = executor
        self._take = take
        self._launched: SimpleQueue[tuple[int, float]] = SimpleQueue()
        start_worker("results", self._retire_all)

    def add(self, handle: int, launched_at: float) -> None:
        self._launched.put((handle, launched_at))

    def _retire_all(self) -> None:
        last = 0.0
        while True:
            handle, launched_at = self._launched.get()
            result = self._executor.retire(handle)
            now = time.perf_counter()
            self._take(result, now - max(launched_at, last))
            last = now
