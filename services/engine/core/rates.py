"""Rates of this engine, learned from its steps: prompt tokens a second, time of a decode step.

Knows nothing of where the figures go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from headwater.engine_core.executor import DrawPlan, Executor, StepPlan, StepResult

WEIGHT = 0.05
"""Weight of the newest step in a mean over steps."""


class MeasuredExecutor:
    """An executor whose steps are timed. The time of a step runs from its launch, or from the
    retirement of the step before where that was later, since steps overlap."""

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float] = monotonic,
        *,
        prefill_seconds: float = 0.0,
    ) -> None:
        """`prefill_seconds`: predicted seconds of a prompt token; 0: there is no prediction."""
        self._executor = executor
        self._clock = clock
        self._expected = prefill_seconds
        self._rates = Rates()
        self._launched: deque[tuple[float, int, int]] = deque()
        self._last_retired = 0.0
        self.prefill_tokens = self.decode_rows = 0
        """Numbers of tokens and rows retired since the last call of `take`."""
        self.seconds = 0.0
        self.swapper = executor.swapper
        self.copies_blocks = executor.copies_blocks
        self.can_draft = executor.can_draft
        self.computes_at_once = executor.computes_at_once
        self.is_ready = executor.is_ready
        self.warm_up = executor.warm_up
        self.prepare = executor.prepare
        self.close = executor.close

    @property
    def prefill_seconds(self) -> float:
        """Seconds a prompt token, as measured once a prompt was computed."""
        if prefill_tps := self._rates.prefill_tps:
            return 1 / prefill_tps
        return self._executor.prefill_seconds or self._expected

    def submit(self, plan: StepPlan) -> int:
        own = plan.counts if plan.num_drafts is None else plan.counts - plan.num_drafts
        decode_rows = int(plan.counts[own == 1].sum())
        self._launched.append((self._clock(), plan.num_tokens - decode_rows, decode_rows))
        return self._executor.submit(plan)

    def draw(self, plan: DrawPlan) -> int:
        self._launched.append((self._clock(), 0, 0))
        return self._executor.draw(plan)

    def retire(self, handle: int) -> StepResult:
        result = self._executor.retire(handle)
        launched, prefill_tokens, decode_rows = self._launched.popleft()
        now = self._clock()
        # A draw belongs to the step that was retired right before it.
        self.prefill_tokens += prefill_tokens
        self.decode_rows += decode_rows
        seconds = now - max(launched, self._last_retired)
        self.seconds += seconds
        self._last_retired = now
        self._rates.observe(prefill_tokens, decode_rows, seconds)
        return result

    def take(self) -> tuple[int, int, float]:
        """Prompt tokens, decode rows and seconds of the step retired since the last call; zeros if
        none was."""
        taken = self.prefill_tokens, self.decode_rows, self.seconds
        self.prefill_tokens = 0
        self.decode_rows = 0
        self.seconds = 0.0
        return taken


class FadingLine:
    """A straight line through points (x, y), the last few dozen above all."""

    def __init__(self) -> None:
        self.x = self.y = 0.0
        """Means."""
        self._xx = self._xy = 0.0
        self._num_points = 0

    def observe(self, x: float, y: float) -> None:
        self._num_points += 1
        weight = max(WEIGHT, 1 / self._num_points)
        self.x += weight * (x - self.x)
        self.y += weight * (y - self.y)
        self._xx += weight * (x * x - self._xx)
        self._xy += weight * (x * y - self._xy)

    @property
    def slope(self) -> float:
        """Slope of the line; 0 where there are too few values, and where y falls with x."""
        variance = self._xx - self.x**2
        return (
            max(0.0, (self._xy - self.x * self.y) / variance) if variance > 1e-6 * self._xx else 0.0
        )

    def at(self, x: float) -> float:
        return self.y + self.slope * (x - self.x)


class Rates:
    """A step has a cost of its own, one for each decode row and one for each prompt token."""

    def __init__(self) -> None:
        self._decode = FadingLine()
        self._prefill = FadingLine()

    def observe(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        if prefill_tokens > 0:
            # The time of the decode rows of a mixed step is subtracted; a tenth of the step stays
            # the prompt's.
            alone = self.itl(decode_rows) if decode_rows else 0.0
            self._prefill.observe(prefill_tokens, max(seconds - alone, seconds / 10))
        elif decode_rows > 0:
            self._decode.observe(decode_rows, seconds)

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens a second; 0 while unknown. Prompts of different lengths separate the cost
        of a token from that of a step; before, both count as the token's."""
        if not self._prefill.y:
            return 0.0
        mean = self._prefill.y / self._prefill.x
        return 1 / min(self._prefill.slope or mean, mean)

    @property
    def itl_per_request(self) -> float:
        """Seconds that one more running request adds to a decode step; 0 while unknown."""
        return self._decode.slope

    def itl(self, decode_rows: int) -> float:
        """Seconds of a decode step over so many rows; 0 while unknown."""
        return max(0.0, self._decode.at(decode_rows))
