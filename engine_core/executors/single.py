"""Computes plans where they are submitted. On a CPU nothing runs beside the engine: a thread for
the model would take a core from the model's own threads whenever the engine plans, and they would
wait for it."""

from __future__ import annotations

from collections import deque

from ..executor import DrawPlan, StepPlan, StepResult, Swapper
from .runner import Runner


class SingleExecutor:
    """See `Executor`."""

    copies_blocks = computes_at_once = True
    prefill_seconds = 0.0
    """Depends on the model and the machine."""

    def __init__(self, runner: Runner, swapper: Swapper | None = None) -> None:
        self._runner = runner
        self.swapper = swapper
        self._done: deque[tuple[int, StepResult]] = deque()

    @property
    def can_draft(self) -> bool:
        return self._runner.can_draft

    def submit(self, plan: StepPlan) -> int:
        self._done.append((plan.step, self._runner.run(plan)))
        return plan.step

    def draw(self, plan: DrawPlan) -> int:
        self._done.append((plan.step, self._runner.draw(plan)))
        return plan.step

    def retire(self, handle: int) -> StepResult:
        step, result = self._done.popleft()
        assert step == handle
        return result

    def is_ready(self, handle: int) -> bool:
        return True

    def warm_up(self) -> float:
        return self._runner.rehearse()

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._done.clear()
