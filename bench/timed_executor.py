"""An executor that adds up the time that its caller spends in it; the rest of a step is the engine's own."""

from __future__ import annotations

import time

from headwater.engine_core.executor import DrawPlan, Executor, StepPlan, StepResult, Swapper


class TimedExecutor:
    """See `Executor`."""

    def __init__(self, executor: Executor) -> None:
        self.launch_seconds = 0.0
        """Seconds in which steps are submitted; a CPU computes them there."""
        self.wait_seconds = 0.0
        """Seconds of waiting for results and reading them."""
        self.num_steps = 0
        self._executor = executor

    @property
    def swapper(self) -> Swapper | None:
        return self._executor.swapper

    @property
    def copies_blocks(self) -> bool:
        return self._executor.copies_blocks

    @property
    def can_draft(self) -> bool:
        return self._executor.can_draft

    @property
    def computes_at_once(self) -> bool:
        return self._executor.computes_at_once

    @property
    def prefill_seconds(self) -> float:
        return self._executor.prefill_seconds

    @property
    def seconds(self) -> float:
        return self.launch_seconds + self.wait_seconds

    def submit(self, plan: StepPlan) -> int:
        start = time.perf_counter()
        handle = self._executor.submit(plan)
        self.launch_seconds += time.perf_counter() - start
        self.num_steps += 1
        return handle

    def draw(self, plan: DrawPlan) -> int:
        return self._executor.draw(plan)

    def retire(self, handle: int) -> StepResult:
        start = time.perf_counter()
        result = self._executor.retire(handle)
        self.wait_seconds += time.perf_counter() - start
        return result

    def is_ready(self, handle: int) -> bool:
        return self._executor.is_ready(handle)

    def warm_up(self) -> float:
        return self._executor.warm_up()

    def prepare(self) -> bool:
        return self._executor.prepare()

    def close(self) -> None:
        self._executor.close()
