"""Figures of a core's ranks and of its model's experts, reported to the server at intervals. Knows
no metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from headwater.engine_core.executor import Executor
from headwater.engine_core.expert_figures import ExpertExecutor
from headwater.engine_core.parallel.rank_facts import RankedExecutor
from headwater.engine_core.system.ring import RingWriter

from .messages import Experts, Ranks, encode

PERIOD_SECONDS = 1.0


class FigureReports:
    def __init__(
        self,
        executor: Executor,
        reports: RingWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._reports = reports
        self._clock = clock
        self._sent_at = -PERIOD_SECONDS

    def send_when_due(self, *, is_idle: bool) -> None:
        """Reports once a second while the core works, and when it has done all."""
        now = self._clock()
        if is_idle or now - self._sent_at >= PERIOD_SECONDS:
            self._sent_at = now
            for message in self._messages():
                self._reports.write(encode(message))

    def _messages(self) -> Iterator[Ranks | Experts]:
        if isinstance(self._executor, RankedExecutor):
            yield Ranks(self._executor.rank_figures())
        if isinstance(self._executor, ExpertExecutor):
            figures = self._executor.expert_figures()
            if figures is not None:
                yield Experts(figures)
