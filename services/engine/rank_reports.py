"""Figures of a core's ranks, reported to the server at intervals. Knows no metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from headwater.engine_core.executor import Executor
from headwater.engine_core.parallel.rank_facts import RankedExecutor
from headwater.engine_core.system.ring import RingWriter

from .messages import Ranks, encode

PERIOD_SECONDS = 1.0


class RankReports:
    def __init__(
        self,
        executor: RankedExecutor,
        reports: RingWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._reports = reports
        self._clock = clock
        self._sent_at = -PERIOD_SECONDS

    def send_when_due(self, *, is_idle: bool) -> None:
        """A report a second while the core works, and one when it has done all."""
        now = self._clock()
        if is_idle or now - self._sent_at >= PERIOD_SECONDS:
            self._sent_at = now
            self._reports.write(encode(Ranks(self._executor.rank_figures())))


def rank_reports_of(executor: Executor, reports: RingWriter) -> RankReports | None:
    """None: the executor has no ranks."""
    return RankReports(executor, reports) if isinstance(executor, RankedExecutor) else None
