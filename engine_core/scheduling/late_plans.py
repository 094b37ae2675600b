"""When a step may be planned: not long before the device can begin it. An answer that comes from
another engine would stand behind the prompts of every step that is planned already.

Knows steps by the number of their prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from .step_builder import PlannedStep

LEAD_SECONDS = 0.05
"""Time for which the device is still busy with prompts when the next step is planned. To plan and
launch a step takes less, so that the device does not wait."""


class LatePlans:
    def __init__(self, clock: Callable[[], float], prefill_seconds: Callable[[], float]) -> None:
        """`prefill_seconds`: time in which the device computes a prompt token; 0 where it is not
        known."""
        self._clock = clock
        self._prefill_seconds = prefill_seconds
        self._num_tokens = 0
        """Prompt tokens of the steps in flight."""
        self._began_at = 0.0
        """When the device began with the oldest of them, as far as one can tell."""

    @property
    def is_early(self) -> bool:
        """Whether the device still computes prompts for longer than `LEAD_SECONDS`."""
        if not self._num_tokens:
            return False
        return (
            self._num_tokens * self._prefill_seconds() - (self._clock() - self._began_at)
            > LEAD_SECONDS
        )

    def note_launched(self, step: PlannedStep) -> None:
        if step.chunks:
            if not self._num_tokens:
                self._began_at = self._clock()
            self._num_tokens += step.num_prompt_tokens

    def note_retired(self, step: PlannedStep) -> None:
        if self._num_tokens:
            self._num_tokens -= step.num_prompt_tokens
            self._began_at = self._clock()
