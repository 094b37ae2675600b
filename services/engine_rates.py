"""What the steps of this engine cost, learned as they pass: prompt tokens a second, time of a decode step.

Knows nothing of where the figures go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from headwater.engine_core.executors.executor import Executor, StepPlan, StepResult

WEIGHT = 0.05
"""Of the newest step in a mean over steps."""


class MeasuredExecutor:
    """An executor whose steps are timed. The time of a step runs from its launch, or from the retirement of the step
    before where that was later, since steps overlap."""

    def __init__(self, executor: Executor, clock: Callable[[], float] = monotonic) -> None:
        self._executor, self._clock = executor, clock
        self._launched: deque[tuple[float, int, int]] = deque()
        self._last_retired = 0.0
        self.prefill_tokens = self.decode_rows = 0
        """Of the step that was retired last; zero again once `take` was called."""
        self.seconds = 0.0

    def submit(self, plan: StepPlan) -> int:
        decode_rows = int((plan.counts == 1).sum())
        self._launched.append((self._clock(), plan.num_tokens - decode_rows, decode_rows))
        return self._executor.submit(plan)

    def retire(self, handle: int) -> StepResult:
        result = self._executor.retire(handle)
        launched, self.prefill_tokens, self.decode_rows = self._launched.popleft()
        now = self._clock()
        self.seconds = now - max(launched, self._last_retired)
        self._last_retired = now
        return result

    def is_ready(self, handle: int) -> bool:
        return self._executor.is_ready(handle)

    def close(self) -> None:
        self._executor.close()

    def take(self) -> tuple[int, int, float]:
        """Prompt tokens, decode rows and seconds of the step retired since the last call; zeros if none was."""
        taken = self.prefill_tokens, self.decode_rows, self.seconds
        self.prefill_tokens, self.decode_rows, self.seconds = 0, 0, 0.0
        return taken


class Rates:
    """Learned from steps. A step costs a base, something a decode row, and the time of its prompt tokens."""

    def __init__(self) -> None:
        self._prefill_tokens = self._prefill_seconds = 0.0
        # Means over decode steps of rows, seconds, rows², rows · seconds: a line fitted with fading memory.
        self._rows = self._seconds = self._rows_squared = self._rows_seconds = 0.0
        self._num_decode_steps = 0

    def observe(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        if prefill_tokens > 0:
            # What the decode rows of a mixed step would have cost alone is not the prompt's, down to a tenth.
            own = max(seconds - self.itl(decode_rows), seconds / 10) if decode_rows else seconds
            self._prefill_tokens += WEIGHT * (prefill_tokens - self._prefill_tokens)
            self._prefill_seconds += WEIGHT * (own - self._prefill_seconds)
        elif decode_rows > 0:
            self._observe_decode(decode_rows, seconds)

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens a second; 0 while unknown."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    @property
    def itl_per_request(self) -> float:
        """Seconds that one more running request adds to a decode step; 0 while unknown."""
        variance = self._rows_squared - self._rows**2
        if variance <= 1e-6 * self._rows_squared:
            return 0.0
        return max(0.0, (self._rows_seconds - self._rows * self._seconds) / variance)

    def itl(self, decode_rows: int) -> float:
        """Seconds of a decode step over so many rows; 0 while unknown."""
        return max(0.0, self._seconds + self.itl_per_request * (decode_rows - self._rows))

    def _observe_decode(self, rows: int, seconds: float) -> None:
        self._num_decode_steps += 1
        weight = max(WEIGHT, 1 / self._num_decode_steps)
        self._rows += weight * (rows - self._rows)
        self._seconds += weight * (seconds - self._seconds)
        self._rows_squared += weight * (rows * rows - self._rows_squared)
        self._rows_seconds += weight * (rows * seconds - self._rows_seconds)
