"""Reports of a rank to the executor's process: progress of its start, results, preparations."""

from __future__ import annotations

import threading

from ...config import ConfigError, EngineConfig
from ...executor import Executor, StepResult
from ...parallel.rank_start import RankStart
from ...parallel.result_messages import (
    Hello,
    Loading,
    RankPrepared,
    Refusal,
    Report,
    WarmedUp,
    Warned,
    encode_report,
    encode_result,
)
from ...system.ring import RingWriter


class RankReports:
    """Reports of ranks, from any thread. A message that many ranks send is reported once."""

    def __init__(self, start: RankStart) -> None:
        layout = start.options.layout
        self.ring = RingWriter(start.rings.reports)
        self._is_speaker = start.rank == layout.speaker
        self._is_first_of_stage = layout.shard(start.rank).index == 0
        # A ring has one writer at a time: one thread reports results, the thread that runs plans
        # everything else.
        self._is_reporting = threading.Lock()

    def loading(self, phase: str, done: int, total: int) -> None:
        """Reports how far the start has come, once for each stage: stages may load on other
        hosts."""
        if self._is_first_of_stage:
            self._report(Loading(phase=phase, done=done, total=total))

    def warned(self, text: str) -> None:
        if self._is_speaker:
            self._report(Warned(text=text))

    def refused(self, error: ConfigError) -> None:
        self._report(Refusal(name=error.name, value=str(error.value), allowed=error.allowed))

    def started(self, executor: Executor, config: EngineConfig) -> None:
        swapper = executor.swapper
        self._report(
            Hello(
                config=config,
                can_draft=executor.can_draft,
                copies_blocks=executor.copies_blocks,
                prefill_seconds=executor.prefill_seconds,
                seconds_per_block=0.0 if swapper is None else swapper.seconds_per_block,
            )
        )

    def prepared(self, is_more_left: bool) -> None:
        if self._is_speaker:
            self._report(RankPrepared(is_more_left=is_more_left))

    def warmed_up(self, seconds: float) -> None:
        self._report(WarmedUp(seconds=seconds))

    def result(self, result: StepResult) -> None:
        """Reports a result, which all ranks of the last stage have."""
        if self._is_speaker:
            self._write(encode_result(result))

    def _report(self, report: Report) -> None:
        self._write(encode_report(report))

    def _write(self, message: bytes) -> None:
        with self._is_reporting:
            self.ring.write(message)
