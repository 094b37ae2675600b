"""Causes that end a stream before its answer is complete, and their consequences for the
request."""

from __future__ import annotations

from enum import Enum

from headwater.proto import common_pb2
from headwater.proto.output_processor_pb2 import OutputFinish
from headwater.services.runtime import errors
from headwater.services.runtime.fair_threads import STAGE_BUSY

ENGINE_UNAVAILABLE = "engine_unavailable"
OUTPUT_PROCESSOR_UNAVAILABLE = "output_processor_unavailable"
BUSY_RETRY_SECONDS = 10.0
BROKEN = (common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_CANCELLED)
DEADLINE = "deadline_exceeded"
"""Reason of an engine that cancels a late request by itself, which may be ahead of the gateway's
own clock."""
SLOW_READER = "slow_reader"
"""Reason with which an engine cancels a request whose client reads no tokens."""


class Cause(Enum):
    """Cause of a failure. The value is the word in metrics and explanations."""

    ENGINE_GONE = "engine_gone"
    HANDED_OVER = "handed_over"
    REFUSED = "refused"
    MISSING = "missing"
    FAULT = "fault"
    SILENT = "silent"
    OUTPUT_PROCESSOR_GONE = "output_processor_gone"

    @property
    def is_of_engine(self) -> bool:
        """Whether the next attempt goes to another engine."""
        return self is not Cause.OUTPUT_PROCESSOR_GONE

    @property
    def is_outage(self) -> bool:
        """Whether other requests avoid the engine too, for a while."""
        return self in (Cause.ENGINE_GONE, Cause.REFUSED, Cause.FAULT, Cause.SILENT)

    @property
    def is_suspicion(self) -> bool:
        """Whether the attempt failed although no stage died. Many such failures at once point to
        this gateway."""
        return self in (Cause.MISSING, Cause.FAULT)


_CAUSES = {
    common_pb2.LOSS_CAUSE_UNSPECIFIED: Cause.ENGINE_GONE,
    common_pb2.LOSS_CAUSE_ENGINE_GONE: Cause.ENGINE_GONE,
    common_pb2.LOSS_CAUSE_HANDED_OVER: Cause.HANDED_OVER,
    common_pb2.LOSS_CAUSE_REFUSED: Cause.REFUSED,
    common_pb2.LOSS_CAUSE_MISSING: Cause.MISSING,
    common_pb2.LOSS_CAUSE_SILENT: Cause.SILENT,
    common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING: Cause.OUTPUT_PROCESSOR_GONE,
}


class StreamLost(errors.Unavailable):
    """A stream ended and the answer has not; another replica may go on with it."""

    def __init__(self, message: str, cause: Cause, *, has_left: bool = False) -> None:
        """`has_left`: whether the stage had announced that it leaves."""
        super().__init__(
            message, code=ENGINE_UNAVAILABLE if cause.is_of_engine else OUTPUT_PROCESSOR_UNAVAILABLE
        )
        self.cause = cause
        self.is_fault = cause is not Cause.HANDED_OVER and not has_left


class TakenOver(errors.ClientGone):
    """Another reader goes on with the stream."""

    code = "stream_taken_over"


class PoisonRequest(errors.InternalError):
    """Two engines died of the request, as far as the gateway can tell."""

    code = "poison_request"


def error_of(finish: OutputFinish) -> errors.HeadwaterError:
    """The error of a stream that ended before its answer."""
    message = finish.error or "the engine ended the request"
    if (final := _final_error(finish, message)) is not None:
        return final
    if finish.retriable:
        has_left = finish.cause == common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING
        return StreamLost(message, _CAUSES.get(finish.cause, Cause.FAULT), has_left=has_left)
    if finish.reason == common_pb2.FINISH_REASON_CANCELLED:
        return _cancelled(message)
    return errors.InternalError(message)


def _final_error(finish: OutputFinish, message: str) -> errors.HeadwaterError | None:
    """The error of a request that cannot continue, by the cause of its end; None: it can."""
    match finish.cause:
        case common_pb2.LOSS_CAUSE_TAKEN_OVER:
            return TakenOver(message)
        case common_pb2.LOSS_CAUSE_GRAMMAR:
            return errors.BadRequest(None, message, code="invalid_grammar")
        case common_pb2.LOSS_CAUSE_BUSY:
            return errors.Unavailable(message, retry_after=BUSY_RETRY_SECONDS, code=STAGE_BUSY)
        case common_pb2.LOSS_CAUSE_LATE:
            return errors.DeadlineExceeded(message, retry_after=finish.retry_seconds)
        case common_pb2.LOSS_CAUSE_REPLACED:
            return errors.Unavailable(message, retry_after=0, code="weights_replaced")
        case _:
            return None


def _cancelled(reason: str) -> errors.HeadwaterError:
    if reason == DEADLINE:
        return errors.DeadlineExceeded("the deadline of the request has passed")
    if reason == SLOW_READER:
        return errors.SlowReader()
    return errors.Unavailable(reason, code=ENGINE_UNAVAILABLE)
