"""Computes plans in this process, in a thread of its own: torch lets go of the interpreter while it computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from headwater.engine_core.executors.executor import DrawPlan, StepPlan, StepResult
from headwater.engine_core.runner import Runner


class SingleExecutor:
    """See `Executor`. Plans run in the order of their submission."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        self._in_flight: deque[tuple[int, Future[StepResult]]] = deque()

    def submit(self, plan: StepPlan) -> int:
        self._in_flight.append((plan.step, self._thread.submit(self._runner.run, plan)))
        return plan.step

    def draw(self, plan: DrawPlan) -> int:
        self._in_flight.append((plan.step, self._thread.submit(self._runner.draw, plan)))
        return plan.step

    def retire(self, handle: int) -> StepResult:
        step, result = self._in_flight.popleft()
        assert step == handle
        return result.result()

    def is_ready(self, handle: int) -> bool:
        step, result = self._in_flight[0]
        assert step == handle
        return result.done()

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._thread.shutdown()
