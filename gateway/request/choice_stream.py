"""Passes messages of an output session for one choice to the choice, its sink and its attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2
from headwater.proto.output_processor_pb2 import RowParts
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession, Scores
from .choice import NEVER, Choice, Sink
from .stream_failure import BROKEN, Cause, StreamLost, error_of

FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}


class StreamEvents(Protocol):
    """Callbacks of a stream, which the stream's attempt implements."""

    def started(self, start: engine_pb2.Start) -> None:
        """Notes that the engine computes the prompt."""
        ...

    def first_token(self, now: float) -> None: ...

    def got_further(self) -> None:
        """A choice is past the position at which an engine died."""
        ...

    def choice_ended(self, choice: Choice) -> None: ...

    def broke(self, error: errors.HeadwaterError) -> None:
        """The stream ended before its answer."""
        ...


class ChoiceStream:
    """Receiver of the output session for one choice. `observe` takes the seconds between a choice's
    pieces."""

    session: OutputSession
    stream_id: int

    def __init__(
        self, choice: Choice, sink: Sink, events: StreamEvents, observe: Callable[[float], None]
    ) -> None:
        self.choice = choice
        self._sink = sink
        self._events = events
        self._observe = observe
        self._opened_at = 0.0

    def opened(self, session: OutputSession, stream_id: int) -> None:
        self.session = session
        self.stream_id = stream_id
        self._opened_at = time.perf_counter()
        self.choice.stream = self

    @property
    def received_at(self) -> float:
        """Time of the stream's last message or, before any, of its opening, on
        `time.perf_counter`."""
        return max(self.choice.last_token_at, self._opened_at)

    def receive(
        self,
        first: int,
        token_ids: list[int],
        text: str,
        offset: int,
        now: float,
        logprobs: Scores,
        parts: RowParts | None,
    ) -> None:
        """Handles a row of the stream. Everything here runs once per engine step and stream."""
        choice = self.choice
        sent_ids = token_ids
        if choice.has_unsent_ids:
            sent_ids = [*choice.known_ids(first), *token_ids]
        if first != len(choice.output_ids):
            fault = f"tokens are missing: expected {len(choice.output_ids)}, got {first}"
            self._events.broke(StreamLost(fault, Cause.FAULT))
            return
        choice.add(token_ids, text, offset, logprobs, parts)
        if choice.last_token_at:
            self._observe(now - choice.last_token_at)
        else:
            self._events.first_token(now)
        choice.last_token_at = now
        if len(choice.output_ids) > choice.doubted_to:
            choice.doubted_to = NEVER
            self._events.got_further()
        choice.grant.received(choice, len(token_ids))
        if self._sink.piece(choice, text, sent_ids, logprobs, parts):
            choice.taken(len(token_ids))

    def started(self, start: engine_pb2.Start) -> None:
        self._events.started(start)

    def prompt_scored(self, part: output_processor_pb2.OutputPromptLogprobs) -> None:
        prompt = self.choice.prompt
        prompt.logprobs.extend(part.tokens)
        prompt.is_scored |= part.last

    def embedded(self, embedding: common_pb2.Embedding) -> None:
        self.choice.vector = embedding.values[:]

    def finished(self, finish: output_processor_pb2.OutputFinish) -> None:
        choice = self.choice
        choice.stream = None
        choice.ended_at = finish.ended_at
        choice.work = finish.work if finish.HasField("work") else None
        if finish.reason in BROKEN or finish.reason not in FINISH_REASONS:
            # Stages of a later version may have other reasons.
            self._events.broke(error_of(finish))
            return
        if choice.has_unsent_ids:
            self._sink.piece(choice, "", choice.known_ids(finish.num_output_tokens), (), None)
        stop = finish.WhichOneof("stop_reason")
        choice.num_reasoning_tokens = finish.num_reasoning_tokens
        choice.has_cut_call = finish.has_cut_call
        stop_reason = getattr(finish, stop) if stop is not None else None
        choice.end(FINISH_REASONS[finish.reason], stop_reason, finish.num_output_tokens)
        self._sink.ended(choice)
        self._events.choice_ended(choice)

    def lost(self, error: errors.HeadwaterError) -> None:
        self.choice.stream = None
        self._events.broke(
            StreamLost(error.message, Cause.OUTPUT_PROCESSOR_GONE, has_left=self.session.leaving)
        )

    def fail(self, error: errors.HeadwaterError) -> None:
        self._events.broke(error)
