"""One Session: many streams of one client over one pair of message streams, in columns both ways.

Reading never waits for a stream and writing never waits for reading. Knows nothing about how tokens
are computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import structlog

from headwater.engine_core.request import NewRequest
from headwater.engine_core.step_output import PromptLogprobsPart, StepOutput
from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb

from ...runtime.errors import BadRequest, HeadwaterError, Unavailable
from ...runtime.session.answering import AnsweringEnd
from ...runtime.session.attempt_fence import Prompt
from ..core.messages import Cancel, Credit, Probe, Stall
from . import early_ends, frames
from .outbox import Outbox
from .requests import PendingAdd, requests_of
from .session_host import Host
from .stream import SLOW_READER_SECONDS, STALLED_SECONDS, Stream


class EngineSession:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams: dict[int, Stream] = {}
        self._stream_ids: dict[int, int] = {}
        """Keyed by the core's key."""
        self._next_index: dict[int, int] = {}
        """Output index of each stream's next token."""
        self._pending: dict[int, PendingAdd] = {}
        """Keyed by first stream: requests whose parts are still coming."""
        self._handing_over: set[int] = set()
        """Streams that another engine continues once they have a token."""
        self._outbox = Outbox()
        self._end = AnsweringEnd(self._outbox.next_frame, self.take, self._on_left)
        self._outbox.on_filled = self._end.wake
        self._has_left = False
        self._fault: Unavailable | None = None

    async def run(self, incoming: AsyncIterator[pb.ClientFrame]) -> AsyncIterator[pb.EngineFrame]:
        """Yields frames for the client, until it or the engine leaves; then cancels its streams."""
        try:
            async with contextlib.aclosing(self._end.run(incoming)) as outgoing:
                async for frame in outgoing:
                    yield frame
        finally:
            self.abandon()
        if self._fault is not None:
            raise self._fault

    def _on_left(self, is_clean: bool) -> None:
        # A client that sends no more still receives its streams to their end.
        self._has_left = is_clean
        if self.is_idle or not is_clean:
            self._end.close()

    def take(self, frame: pb.ClientFrame) -> None:
        """Does what a client's frame asks for: cancels first, but a cancel of an Add in the same
        frame last."""
        early = [
            cancel for cancel in frame.cancels if not self.cancel(cancel.stream_id, cancel.reason)
        ]
        for add in frame.adds:
            self._add(add)
        for part in frame.parts:
            self._extend(part)
        if frame.credits:
            self._grant(frame.credits)
        if frame.probed:
            self._probe(frame.probed)
        for cancel in early:
            self.cancel(cancel.stream_id, cancel.reason)

    def deliver(self, output: StepOutput) -> None:
        """Queues what the step says about this session's streams, in one frame if it fits."""
        rows = frames.Rows.of(output, self._stream_ids)
        self._next_index.update(
            zip(rows.stream_ids, map(operator.add, rows.first_index, rows.num_tokens), strict=True)
        )
        for part in output.prompt_logprobs:
            if part.key in self._stream_ids:
                self._queue_chunks(output.step, part)
        for key, values in output.embeddings.items():
            if (stream_id := self._stream_ids.get(key)) is not None:
                self._outbox.put([frames.embedding_frame(output.step, stream_id, values)])
        ids = self._stream_ids
        figures = self._host.core_figures
        starts = [
            self._streams[ids[start.key]].start(start, figures)
            for start in output.starts
            if start.key in ids
        ]
        finishes = [
            self._forget(ids[end.key]).finish(end, figures)
            for end in output.finishes
            if end.key in ids
        ]
        at_once = [finish for finish in finishes if not self._outbox.holds(finish)]
        self._outbox.put(frames.step_frames(output.step, rows, starts, at_once))
        if finishes:
            self._streams_ended()
        for stream_id in self._handing_over.intersection(rows.stream_ids):
            self._handing_over.remove(stream_id)
            self.cancel(stream_id, early_ends.PREFILLED)

    def cancel(self, stream_id: int, reason: str) -> bool:
        """Ends a stream within a step. Returns False if no stream has the id."""
        if (first_stream := self._first_of_pending(stream_id)) is not None:
            pending = self._pending[first_stream]
            pending.cancelled[stream_id] = reason
            if len(pending.cancelled) == len(pending.add.stream_ids):
                self._drop_pending(first_stream, reason)
            return True
        if (stream := self._streams.get(stream_id)) is None:
            return False
        if not stream.cancel_reason:
            stream.cancel_reason = reason or early_ends.CANCELLED
            keeps_answer = stream.cancel_reason not in early_ends.UNWANTED
            self._host.send(Cancel([stream.key], keeps_answer))
        return True

    def cancel_starved(self, now: float) -> None:
        """Cancels streams whose reader has given no credit for too long, and reports shorter stalls
        to the core. To be called about once a second."""
        stalled = []
        for stream_id, stream in self._streams.items():
            seconds = stream.starved_seconds(self._next_index[stream_id], now)
            if seconds >= SLOW_READER_SECONDS:
                self.cancel(stream_id, early_ends.SLOW_READER)
            elif seconds >= STALLED_SECONDS and not stream.is_stalled:
                stream.is_stalled = True
                stalled.append(stream.key)
        if stalled:
            self._host.send(Stall(stalled))

    def hand_over(self, most_tokens: float) -> int:
        """Ends streams that may need more tokens than that to end by themselves; another replica
        goes on with them.

        Returns how many there were.
        """
        index = self._next_index
        long = [
            each
            for each, stream in self._streams.items()
            if stream.num_left(index[each]) > most_tokens
        ]
        for first_stream in (pending := list(self._pending)):
            self._drop_pending(first_stream, early_ends.DRAINING)
        for stream_id in long:
            self.cancel(stream_id, early_ends.DRAINING)
        return len(pending) + len(long)

    def end(self, fault: Unavailable | None = None) -> None:
        """Ends the session after the queued frames. With a fault, running streams end with it."""
        if fault is not None:
            self._fault = fault
            stream_ids = [
                *self._streams,
                *(i for pending in self._pending.values() for i in pending.add.stream_ids),
            ]
            self.abandon()
            error = common_pb2.FINISH_REASON_ERROR
            self._end_streams(
                stream_ids, error, fault.message, cause=common_pb2.LOSS_CAUSE_ENGINE_GONE
            )
        self._end.close()

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self._pending

    @property
    def num_streams(self) -> int:
        return len(self._streams) + len(self._pending)

    def _add(self, add: pb.Add) -> None:
        if not self._are_new(add.stream_ids):
            return
        try:
            self._host.check_open()
            if not self._end_if_stale(add):
                self._pending[add.stream_ids[0]] = PendingAdd(add, self._host.limits)
                self._start_if_complete(add.stream_ids[0])
        except (BadRequest, Unavailable) as error:
            self._refuse(add, error)

    def _end_if_stale(self, add: pb.Add) -> bool:
        """Ends the choices of an attempt if a later attempt is known. Returns whether there is
        one."""
        is_stale = self._host.fence.is_stale(_prompt_of(add), add.attempt)
        if is_stale:
            reason = common_pb2.FINISH_REASON_CANCELLED
            cause = common_pb2.LOSS_CAUSE_SUPERSEDED
            self._end_streams(add.stream_ids, reason, early_ends.SUPERSEDED, cause=cause)
        return is_stale

    def _extend(self, part: pb.AddPart) -> None:
        # A part of a request that was refused or cancelled is dropped.
        if (pending := self._pending.get(part.stream_id)) is None:
            return
        try:
            pending.extend(part)
            self._start_if_complete(part.stream_id)
        except (BadRequest, Unavailable) as error:
            self._refuse(pending.add, error)

    def _are_new(self, stream_ids: Sequence[int]) -> bool:
        """NOTE: a stream id in use means that client and engine disagree on what runs, so both
        streams of it end."""
        in_use = [
            i for i in stream_ids if i in self._streams or self._first_of_pending(i) is not None
        ]
        if stream_ids and not in_use and len(set(stream_ids)) == len(stream_ids):
            return True
        structlog.get_logger().error(
            "stream ids are not new", stream_ids=list(stream_ids), in_use=in_use
        )
        for stream_id in in_use:
            if (first_stream := self._first_of_pending(stream_id)) is not None:
                self._drop_pending(first_stream, "stream id used again")
            elif self.cancel(stream_id, "stream id used again"):
                self._forget(stream_id).span.end("stream id used again")
        error = f"stream_ids is {list(stream_ids)}; allowed: ids that the session does not use"
        self._end_streams(set(stream_ids), common_pb2.FINISH_REASON_ERROR, error)
        return False

    def _start_if_complete(self, first_stream: int) -> None:
        pending = self._pending[first_stream]
        if not pending.is_complete:
            return
        add = pending.add
        requests = requests_of(pending, self._host.limits, self._host.keys)
        del self._pending[first_stream]
        # A later attempt may have begun while parts of this one came.
        if self._end_if_stale(add):
            return
        for stream_id, request in zip(add.stream_ids, requests, strict=True):
            self._enter(stream_id, request, add, pending.grammar)
        for stream_id, reason in pending.cancelled.items():
            self.cancel(stream_id, reason)

    def _first_of_pending(self, stream_id: int) -> int | None:
        """The first stream of the incomplete request that has this stream, if there is one."""
        return next(
            (first for first, each in self._pending.items() if stream_id in each.add.stream_ids),
            None,
        )

    def _drop_pending(self, first_stream: int, reason: str) -> None:
        stream_ids = self._pending.pop(first_stream).add.stream_ids
        cause = early_ends.CAUSES.get(reason, early_ends.LIVE)
        self._end_streams(stream_ids, common_pb2.FINISH_REASON_CANCELLED, reason, cause=cause)

    def _enter(self, stream_id: int, request: NewRequest, add: pb.Add, grammar: bytes) -> None:
        deadline = None
        if add.deadline_ms:
            loop = asyncio.get_running_loop()
            deadline = loop.call_later(
                add.deadline_ms / 1000, self.cancel, stream_id, "deadline_exceeded"
            )
        attributes = {
            "headwater.request_id": add.request_id,
            "attempt": add.attempt,
            "choice": request.choice_index,
        }
        span = self._host.tracing.begin("engine", add.traceparent, add.tracestate, **attributes)
        structlog.get_logger().debug(
            "stream entered", trace_id=span.context.trace_id, tenant=add.tenant, **attributes
        )
        first_index = len(request.output_ids)
        granted = len(request.output_ids) + request.credit
        prompt = _prompt_of(add)
        max_tokens = request.sampling.max_tokens
        self._streams[stream_id] = Stream(
            stream_id,
            request.key,
            prompt,
            max_tokens,
            first_index,
            granted,
            request.prompt_ids,
            deadline,
            span,
        )
        if add.hand_over:
            self._handing_over.add(stream_id)
        self._stream_ids[request.key] = stream_id
        self._next_index[stream_id] = first_index
        self._host.fence.enter(
            prompt, add.attempt, request.key, lambda: self.cancel(stream_id, early_ends.SUPERSEDED)
        )
        self._host.enter(request, grammar)

    def _grant(self, credits: Iterable[pb.Credit]) -> None:
        granted = []
        for credit in credits:
            # Credit for a stream that just ended is late, not wrong.
            if (stream := self._streams.get(credit.stream_id)) is not None:
                stream.granted += credit.tokens
                # The reader of this stream takes tokens, however soon they are used up.
                stream.starved_since = None
                stream.is_stalled = False
                granted.append((stream.key, credit.tokens))
        if granted:
            self._host.send(Credit([key for key, _ in granted], [tokens for _, tokens in granted]))

    def _probe(self, asked: Iterable[int]) -> None:
        """Reports the end of requests that this engine does not have. The core answers for the
        others."""
        known = []
        missing = []
        for stream_id in asked:
            if (stream := self._streams.get(stream_id)) is not None:
                known.append(stream.key)
            elif self._first_of_pending(stream_id) is None:
                missing.append(stream_id)
        if known:
            self._host.send(Probe(known))
        if missing:
            self._report_missing(missing)
        # Without this report a busy engine and a dead one look the same to the gateway.
        self._outbox.put([pb.EngineFrame(answered=True)])

    def _report_missing(self, stream_ids: Sequence[int]) -> None:
        structlog.get_logger().warning(
            "streams that were asked for are not here", stream_ids=list(stream_ids)
        )
        error = common_pb2.FINISH_REASON_ERROR
        self._end_streams(
            stream_ids, error, early_ends.MISSING, cause=common_pb2.LOSS_CAUSE_MISSING
        )

    def _queue_chunks(self, step: int, part: PromptLogprobsPart) -> None:
        stream_id = self._stream_ids[part.key]
        first = part.first_position
        token_ids = self._streams[stream_id].prompt_ids[first : first + len(part.entries)]
        for frame in frames.prompt_logprob_frames(
            step, stream_id, first, token_ids, part.entries, part.last
        ):
            self._outbox.put_chunk(frame)

    def _refuse(self, add: pb.Add, error: HeadwaterError) -> None:
        self._pending.pop(add.stream_ids[0], None)
        cause = common_pb2.LOSS_CAUSE_REFUSED if isinstance(error, Unavailable) else early_ends.LIVE
        self._end_streams(
            add.stream_ids, common_pb2.FINISH_REASON_ERROR, error.message, cause=cause
        )

    def _end_streams(
        self,
        stream_ids: Iterable[int],
        reason: common_pb2.FinishReason.ValueType,
        error: str,
        *,
        cause: common_pb2.LossCause.ValueType = early_ends.LIVE,
    ) -> None:
        """Reports the end of streams that the core does not know, or no longer knows."""
        attributes: dict[str, Any] = {
            "reason": reason,
            "error": error[: frames.MAX_ERROR_CHARS],
            "cause": cause,
        }
        finishes = [
            pb.Finish(stream_id=stream_id, retriable=cause != early_ends.LIVE, **attributes)
            for stream_id in stream_ids
        ]
        self._outbox.put(frames.step_frames(0, frames.Rows(), [], finishes))
        self._streams_ended()

    def _streams_ended(self) -> None:
        if self.is_idle:
            self._host.session_changed()
            if self._has_left:
                self._end.close()

    def _forget(self, stream_id: int) -> Stream:
        stream = self._streams.pop(stream_id)
        self._handing_over.discard(stream_id)
        del self._stream_ids[stream.key], self._next_index[stream_id]
        self._host.fence.leave(stream.prompt, stream.key)
        if stream.deadline is not None:
            stream.deadline.cancel()
        return stream

    def abandon(self) -> None:
        """Forgets the streams of a client that is gone, and has the core drop them."""
        self._pending.clear()
        streams = [self._forget(stream_id) for stream_id in list(self._streams)]
        for stream in streams:
            stream.span.end("abandoned")
        if streams:
            # Its requests may go on in other attempts, from the tokens that it has.
            self._host.send(Cancel([stream.key for stream in streams], keeps_answer=True))
        self._host.session_changed()


def _prompt_of(add: pb.Add) -> Prompt:
    return add.request_id, add.prompt_index
