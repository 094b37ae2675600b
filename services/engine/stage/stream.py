"""One stream of a session: what it was asked with, how far its reader is, and what is reported of
its start and its end.

Knows nothing about frames, about other streams, or about the core.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.request import FinishReason
from headwater.engine_core.step_output import Finished, Started, Work
from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb

from ...runtime.session.attempt_fence import Prompt
from ...runtime.tracing import Span
from ..core.figures import CoreFigures
from . import early_ends
from .frames import MAX_ERROR_CHARS

SLOW_READER_SECONDS = 30.0
"""Seconds without credit after which a stream is cancelled: it holds blocks that others could
use."""

STALLED_SECONDS = 1.0
"""Seconds without credit after which a stream gives its seat and blocks to waiting requests. Longer
than credit takes on a busy machine, since a preempted request may have to compute its tokens
again."""

REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
    FinishReason.UNFOLLOWABLE: common_pb2.FINISH_REASON_ERROR,
    FinishReason.BUSY: common_pb2.FINISH_REASON_ERROR,
    FinishReason.MISSING: common_pb2.FINISH_REASON_ERROR,
    FinishReason.LATE: common_pb2.FINISH_REASON_ERROR,
    FinishReason.REPLACED: common_pb2.FINISH_REASON_ERROR,
}


@dataclass(slots=True)
class Stream:
    stream_id: int
    key: int
    """Name of the choice between server and core."""
    prompt: Prompt
    max_tokens: int
    num_resumed: int
    """Output tokens that an earlier engine computed."""
    granted: int
    """Output index up to which the reader has room."""
    prompt_ids: list[int]
    deadline: asyncio.TimerHandle | None
    span: Span
    cancel_reason: str = ""
    started_at: float | None = None
    """Time at which its first token came, on `time.perf_counter`."""
    first_weights: int | None = None
    """Index, among the core's weights, of those with which it began."""
    starved_since: float | None = None
    is_stalled: bool = False
    """Whether the core knows that the reader takes nothing."""

    def num_left(self, next_index: int) -> int:
        """Tokens that it may still need after those before `next_index`."""
        return 0 if self.cancel_reason else max(1, self.max_tokens - next_index)

    def starved_seconds(self, next_index: int, now: float) -> float:
        """How long its reader has granted nothing. To be asked about once a second."""
        if self.granted > next_index:
            self.starved_since = None
            self.is_stalled = False
            return 0.0
        if self.starved_since is None:
            self.starved_since = now
        return now - self.starved_since

    def start(self, started: Started, figures: CoreFigures) -> pb.Start:
        now = time.perf_counter()
        self.started_at = now
        self.first_weights = len(figures.weights) - 1
        scheduled_at = now - started.prefill_seconds
        self.span.part("queue", scheduled_at - started.queue_seconds, scheduled_at)
        self.span.part("prefill", scheduled_at, now, cached_tokens=started.cached_tokens)
        return pb.Start(
            stream_id=self.stream_id,
            cached_tokens=started.cached_tokens,
            queue_seconds=started.queue_seconds,
            prefill_seconds=started.prefill_seconds,
            policy=started.policy,
            fcfs_queue_seconds=started.fcfs_queue_seconds,
            cached_by_tier=started.cached_by_tier,
        )

    def finish(self, finished: Finished, figures: CoreFigures) -> pb.Finish:
        """The end, with what the engine did for the stream."""
        self._end_span(finished)
        error = finished.error
        cause = early_ends.LIVE
        if finished.reason is FinishReason.CANCELLED:
            error = error or self.cancel_reason
            cause = early_ends.CAUSES.get(self.cancel_reason, early_ends.LIVE)
        elif finished.reason is FinishReason.MISSING:
            error = early_ends.MISSING
            cause = common_pb2.LOSS_CAUSE_MISSING
        elif finished.reason is FinishReason.UNFOLLOWABLE:
            cause = common_pb2.LOSS_CAUSE_GRAMMAR
        elif finished.reason is FinishReason.BUSY:
            cause = common_pb2.LOSS_CAUSE_BUSY
        elif finished.reason is FinishReason.LATE:
            cause = common_pb2.LOSS_CAUSE_LATE
        elif finished.reason is FinishReason.REPLACED:
            cause = common_pb2.LOSS_CAUSE_REPLACED
        return pb.Finish(
            stream_id=self.stream_id,
            reason=REASONS[finished.reason],
            stop_token_id=finished.stop_token_id,
            num_output_tokens=finished.num_output_tokens,
            error=error[:MAX_ERROR_CHARS],
            retriable=cause not in early_ends.FINAL,
            cause=cause,
            retry_seconds=finished.retry_seconds,
            work=self._work(finished.work, finished.num_output_tokens, figures)
            if finished.work is not None
            else None,
        )

    def _end_span(self, finished: Finished) -> None:
        work = finished.work
        if self.started_at is not None:
            self.span.part(
                "decode",
                self.started_at,
                time.perf_counter(),
                output_tokens=finished.num_output_tokens,
            )
        if work is None:
            self.span.end(finished.error)
        else:
            attributes = {
                "steps": work.num_steps,
                "batch": work.mean_batch,
                "preemptions": work.num_preemptions,
            }
            attributes |= {
                "draft_tokens": work.num_draft_tokens,
                "accepted_tokens": work.num_accepted_tokens,
            }
            self.span.end(finished.error, **attributes)

    def _work(self, work: Work, num_output_tokens: int, figures: CoreFigures) -> pb.Work:
        experts = figures.experts
        weights = [] if self.first_weights is None else figures.weights[self.first_weights :]
        return pb.Work(
            preemptions=work.num_preemptions,
            steps=work.num_steps,
            mean_batch=work.mean_batch,
            draft_tokens=work.num_draft_tokens,
            accepted_tokens=work.num_accepted_tokens,
            output_tokens=num_output_tokens - self.num_resumed,
            experts=None if experts is None else _experts(experts),
            kv_bytes=work.kv_bytes,
            weights=[pb.Weights(**each._asdict()) for each in weights],
        )


def _experts(figures: ExpertFigures) -> pb.Experts:
    return pb.Experts(
        largest_share=max(figures.largest_shares, default=0.0),
        step_experts=figures.num_read,
        step_bytes=figures.num_bytes_read,
    )
