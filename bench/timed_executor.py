"""An executor that measures the time that its caller spends in it; the rest of a step is the
engine's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from headwater.engine_core.executor import Executor, StepPlan, StepResult


class TimedExecutor:
    """See `Executor`. Everything but steps is passed on as it is."""

    def __init__(self, executor: Executor, timer: Callable[[], float] = time.perf_counter) -> None:
        """`timer`: seconds."""
        self.launch_seconds = 0.0
        """Seconds spent in `submit`; a CPU computes steps there."""
        self.wait_seconds = 0.0
        """Seconds of waiting for results and reading them."""
        self.num_steps = 0
        self._executor = executor
        self._timer = timer

    @property
    def as_executor(self) -> Executor:
        return cast(Executor, self)

    @property
    def seconds(self) -> float:
        return self.launch_seconds + self.wait_seconds

    def submit(self, plan: StepPlan) -> int:
        start = self._timer()
        handle = self._executor.submit(plan)
        self.launch_seconds += self._timer() - start
        self.num_steps += 1
        return handle

    def retire(self, handle: int) -> StepResult:
        start = self._timer()
        result = self._executor.retire(handle)
        self.wait_seconds += self._timer() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)
