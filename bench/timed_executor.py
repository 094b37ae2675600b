"""An executor that adds up the time that its caller spends in it; the rest of a step is the
engine's own."""

from __future__ import annotations

import time
from typing import Any, cast

from headwater.engine_core.executor import Executor, StepPlan, StepResult


class TimedExecutor:
    """See `Executor`. Everything but steps is passed on as it is."""

    def __init__(self, executor: Executor) -> None:
        self.launch_seconds = 0.0
        """Seconds in which steps are submitted; a CPU computes them there."""
        self.wait_seconds = 0.0
        """Seconds of waiting for results and reading them."""
        self.num_steps = 0
        self._executor = executor

    @property
    def as_executor(self) -> Executor:
        return cast(Executor, self)

    @property
    def seconds(self) -> float:
        return self.launch_seconds + self.wait_seconds

    def submit(self, plan: StepPlan) -> int:
        start = time.perf_counter()
        handle = self._executor.submit(plan)
        self.launch_seconds += time.perf_counter() - start
        self.num_steps += 1
        return handle

    def retire(self, handle: int) -> StepResult:
        start = time.perf_counter()
        result = self._executor.retire(handle)
        self.wait_seconds += time.perf_counter() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)
