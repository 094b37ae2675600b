"""A lane whose jobs run when a test says so, in the thread of the test."""

from __future__ import annotations

from collections import deque

from headwater.engine_core.system.lanes import Job


class ManualLane:
    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def run(self, at_most: int = 1 << 30) -> None:
        """Runs jobs that wait, and those that they submit."""
        for _ in range(at_most):
            if not self.jobs:
                return
            self.jobs.popleft()()
