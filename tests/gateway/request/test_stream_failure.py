"""Why a stream ended before its answer, as stages say it, and what follows for the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.gateway.request.choice import Choice
from headwater.gateway.request.choice_stream import ChoiceStream
from headwater.gateway.request.prepared_prompt import PreparedPrompt
from headwater.gateway.request.stream_failure import Cause, StreamLost, TakenOver, error_of
from headwater.proto import common_pb2
from headwater.proto.output_processor_pb2 import OutputFinish
from headwater.services.runtime.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    SlowReader,
    Unavailable,
)

ATTEMPTS = {
    "UNSPECIFIED": Cause.ENGINE_GONE,
    "ENGINE_GONE": Cause.ENGINE_GONE,
    "HANDED_OVER": Cause.HANDED_OVER,
    "REFUSED": Cause.REFUSED,
    "MISSING": Cause.MISSING,
    "FAULT": Cause.FAULT,
    # The gateway's own later attempt ends the one before; no stage says so of the latest.
    "SUPERSEDED": Cause.FAULT,
    "OUTPUT_PROCESSOR_LEAVING": Cause.OUTPUT_PROCESSOR_GONE,
    "SILENT": Cause.SILENT,
}
"""Causes after which another attempt goes on."""
ENDS = {
    "GRAMMAR": BadRequest,
    "BUSY": Unavailable,
    "LATE": DeadlineExceeded,
    "TAKEN_OVER": TakenOver,
    "REPLACED": Unavailable,
}
"""Causes that end the request."""


def finish_of(name: str) -> OutputFinish:
    cause = common_pb2.LossCause.Value(f"LOSS_CAUSE_{name}")
    return OutputFinish(
        reason=common_pb2.FINISH_REASON_ERROR, cause=cause, retriable=True, error="so"
    )


def test_every_cause_of_a_loss_has_its_row() -> None:
    names = {
        name.removeprefix("LOSS_CAUSE_") for name in common_pb2.LossCause.DESCRIPTOR.values_by_name
    }
    assert names == {*ATTEMPTS, *ENDS}, (
        "say in gateway/request/stream_failure.py what the cause means, and here"
    )


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_next_attempt_of_a_lost_stream_names_the_cause(name: str) -> None:
    error = error_of(finish_of(name))
    assert isinstance(error, StreamLost)
    assert error.cause is ATTEMPTS[name]


@pytest.mark.parametrize("name", ENDS)
def test_a_fault_of_the_request_itself_is_not_tried_again(name: str) -> None:
    error = error_of(finish_of(name))
    assert isinstance(error, ENDS[name])
    assert not isinstance(error, StreamLost)


def test_an_engine_that_is_too_busy_for_a_grammar_is_no_fault_of_the_request() -> None:
    error = error_of(finish_of("BUSY"))
    assert (error.code, error.retry_after, error.message) == ("stage_busy", 10.0, "so")


def test_a_stream_that_may_not_be_tried_again_ends_by_its_reason() -> None:
    cancelled = common_pb2.FINISH_REASON_CANCELLED
    broken = common_pb2.FINISH_REASON_ERROR
    assert isinstance(
        error_of(OutputFinish(reason=cancelled, error="deadline_exceeded")), DeadlineExceeded
    )
    assert isinstance(error_of(OutputFinish(reason=cancelled, error="slow_reader")), SlowReader)
    assert type(error_of(OutputFinish(reason=cancelled))) is Unavailable
    assert isinstance(error_of(OutputFinish(reason=broken)), InternalError)


def stream_to(received: list[Any]) -> ChoiceStream:
    """A stream that appends its errors to `heard`."""
    events = SimpleNamespace(broke=received.append)
    return ChoiceStream(
        Choice(0, 0, PreparedPrompt()), cast("Any", None), cast("Any", events), lambda _: None
    )


def test_a_reason_that_only_later_versions_know_ends_its_stream_alone() -> None:
    received = list[Any]()
    stream_to(received).finished(OutputFinish(reason=cast("Any", 99)))
    assert [type(each) for each in received] == [InternalError]


@pytest.mark.parametrize("has_left", [False, True])
def test_the_end_of_an_output_processor_that_had_left_is_no_fault(has_left: bool) -> None:
    received = list[Any]()
    stream = stream_to(received)
    stream.opened(cast("Any", SimpleNamespace(leaving=has_left)), 1)
    stream.lost(Unavailable("gone"))
    assert [(each.cause, each.is_fault) for each in received] == [
        (Cause.OUTPUT_PROCESSOR_GONE, not has_left)
    ]


def test_a_request_that_an_engine_refuses_as_late_says_when_another_may_be_in_time() -> None:
    finish = finish_of("LATE")
    finish.retry_seconds = 2.5
    error = error_of(finish)
    assert (error.code, error.retry_after, error.message) == ("deadline_exceeded", 2.5, "so")
