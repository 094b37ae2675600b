"""Figures of an engine's steps: histograms for Prometheus, and rates that its load reports."""

from __future__ import annotations

import math
import time
from collections import Counter as Tally

from headwater.engine_core.queue_policies import POLICIES

from ..core.messages import Step
from ..core.rates import Rates
from .metrics import (
    DECODE_SECONDS,
    MASK_SECONDS,
    POLICY_QUEUE_SECONDS,
    PREFILL_SECONDS,
    QUEUE_SECONDS,
    STEP_SECONDS,
    STEP_TOKENS,
)


class StepFigures:
    def __init__(self, model_name: str) -> None:
        self.rates = Rates()
        self.num_finished: Tally[str] = Tally()
        """Streams by the reason of their end."""
        self._step_seconds = STEP_SECONDS.labels(model_name)
        self._mask_seconds = MASK_SECONDS.labels(model_name)
        self._queue_seconds = QUEUE_SECONDS.labels(model_name)
        self._policy_seconds = {
            name: POLICY_QUEUE_SECONDS.labels(model_name, name) for name in POLICIES
        }
        self._prefill_seconds = PREFILL_SECONDS.labels(model_name)
        self._decode_seconds = DECODE_SECONDS.labels(model_name)
        self._step_tokens = STEP_TOKENS.labels(model_name)
        self._started_at: dict[int, float] = {}
        """Time at which the first token of a running stream came, by the core's key."""

    def note_masks(self, seconds: float) -> None:
        """Notes the time in which masks of a step were filled."""
        self._mask_seconds.observe(seconds)

    def tokens_within(self, seconds: float, num_running: int) -> float:
        """Tokens that each of so many requests gets in this time."""
        seconds_per_token = self.rates.itl(max(num_running, 1))
        return seconds / seconds_per_token if seconds_per_token else math.inf

    def note(self, step: Step) -> None:
        if step.seconds:
            self.rates.observe(step.prefill_tokens, step.decode_rows, step.seconds)
            self._step_seconds.observe(step.seconds)
            self._step_tokens.observe(step.prefill_tokens + step.decode_rows)
        now = time.perf_counter()
        for started in step.output.starts:
            self._started_at[started.key] = now
            self._queue_seconds.observe(started.queue_seconds)
            self._policy_seconds[started.policy].observe(started.queue_seconds)
            self._prefill_seconds.observe(started.prefill_seconds)
        for finished in step.output.finishes:
            if (started_at := self._started_at.pop(finished.key, None)) is not None:
                self._decode_seconds.observe(now - started_at)
        self.num_finished.update(finished.reason.value for finished in step.output.finishes)
