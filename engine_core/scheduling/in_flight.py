"""Plans that an executor has been given and that are not retired, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from ..executor import DrawPlan, Executor, StepPlan, StepResult
from ..page_groups import block_of
from .step_builder import PlannedStep


class StepsInFlight:
    """Queue of plans in flight: up to `depth` steps, and draws between them; see `Executor`."""

    def __init__(self, executor: Executor, depth: int) -> None:
        self._executor = executor
        self._depth = depth
        self._queue: deque[tuple[int, PlannedStep]] = deque()
        self._num_steps = 0
        """Plans in the queue that are steps; the others are draws."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[PlannedStep]:
        return (planned for _, planned in self._queue)

    @property
    def has_room_for_step(self) -> bool:
        # Masks that come together may be too many for one draw: several are in flight then, with no
        # step between.
        return self._num_steps < self._depth and len(self._queue) <= 2 * self._depth

    @property
    def has_room_for_draw(self) -> bool:
        return len(self._queue) < 2 * self._depth

    @property
    def is_oldest_ready(self) -> bool:
        """Whether the oldest plan is computed; False where nothing is in flight."""
        return bool(self._queue) and self._executor.is_ready(self._queue[0][0])

    @property
    def is_computing(self) -> bool:
        """Whether the device is still computing a submitted step, as far as the oldest plan
        shows."""
        return self._num_steps > 0 and not self.is_oldest_ready

    @property
    def is_oldest_draw(self) -> bool:
        return bool(self._queue) and isinstance(self._queue[0][1].plan, DrawPlan)

    @property
    def youngest(self) -> int:
        """Number of the youngest step; 0: there is none."""
        return self._queue[-1][1].plan.step if self._queue else 0

    def last_to_compute(self, hashes: Collection[bytes]) -> int:
        """Number of the youngest step in flight that computes one of these blocks or their pages;
        0: all are computed. A block counts as cached as soon as its step is planned."""
        wanted = set(map(block_of, hashes))
        return max(
            (planned.plan.step for planned in self if not wanted.isdisjoint(planned.cached)),
            default=0,
        )

    def submit(self, planned: PlannedStep) -> None:
        """Launches the plan on the executor."""
        if isinstance(planned.plan, StepPlan):
            handle = self._executor.submit(planned.plan)
            self._num_steps += 1
        else:
            handle = self._executor.draw(planned.plan)
        self._queue.append((handle, planned))

    def retire(self) -> tuple[PlannedStep, StepResult]:
        """Waits for the oldest plan and takes it out of the queue."""
        handle, planned = self._queue.popleft()
        self._num_steps -= isinstance(planned.plan, StepPlan)
        return planned, self._executor.retire(handle)
