"""One Session with a gateway: its requests go to their engines, their text comes back in one stream
of frames.

Reading never waits for writing. Knows which stream is at which engine; knows nothing about tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import structlog

from headwater.proto import common_pb2
from headwater.proto.common_pb2 import AnswerFormat
from headwater.proto.engine_pb2 import AddPart, Cancel, Credit
from headwater.proto.output_processor_pb2 import (
    Attach,
    GatewayFrame,
    LetGo,
    Open,
    OutputFinish,
    OutputFrame,
)

from ..answers.parser import unknown_parser
from ..runtime.gateway_identity import NOBODY, Gateway
from ..runtime.session.answering import AnsweringEnd
from ..runtime.tracing import NO_TRACING, Span, Tracing
from ..text.tokenizer import Tokenizer
from . import metrics as output_metrics
from .engines import EngineLinks
from .frames import Outbox
from .running_request import RunningChoice, RunningRequest
from .stream import OutputStream, Sink
from .stream_log import StreamLog
from .stream_logs import StreamLogs
from .text_plan import TextPlan


class GatewaySession:
    """`tokenizers` by the names of the models that they belong to. All stream ids are the
    gateway's."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        links: EngineLinks,
        tracing: Tracing = NO_TRACING,
        logs: StreamLogs | None = None,
        gateway: Gateway = NOBODY,
    ) -> None:
        self._tokenizers = tokenizers
        self._links = links
        self._tracing = tracing
        self._logs = logs if logs is not None else StreamLogs()
        self.gateway = gateway
        self._usage = self._logs.usage
        self._contexts: dict[int, bytes] = {}
        """Resume contexts of requests that are about to be opened, by first stream id."""
        self._choices: dict[int, RunningChoice] = {}
        """Keyed by stream id."""
        self._incomplete: dict[int, RunningRequest] = {}
        """Requests of which parts are missing, by first stream id."""
        self._read_logs: dict[int, StreamLog] = {}
        """Logs that this session reads, by each of their stream ids."""
        self._log_ids: dict[StreamLog, list[int]] = {}
        self.outbox = Outbox()
        self._end = AnsweringEnd(self.outbox.next_frame, self.take, lambda _: self.end())
        self.outbox.on_filled = self._end.wake
        self._refusal: str | None = None
        """Why new streams are refused, if they are."""

    async def run(self, incoming: AsyncIterator[GatewayFrame]) -> AsyncIterator[OutputFrame]:
        """Frames for the gateway, until it leaves. Only streams that can be resumed outlive the
        session."""
        self._usage.on_session_opened(self.gateway)
        try:
            async with contextlib.aclosing(self._end.run(incoming)) as frames:
                async for frame in frames:
                    output_metrics.GATEWAY_FRAMES.inc()
                    yield frame
                    self._on_frame_sent(frame)
        finally:
            for log in list(self._log_ids):
                self._detach(log, None)
            self._cancel_all("gateway_gone")
            self._usage.on_session_closed(self.gateway)

    def leave(self, reason: str) -> None:
        """Refuses new streams from now on; the session ends with the last one that runs."""
        self._refusal = reason
        self._end_if_left()

    def end(self) -> None:
        """Ends the session after what is queued."""
        self._end.close()

    def _on_frame_sent(self, frame: OutputFrame) -> None:
        """Notes that the gateway's connection has taken a frame."""
        for stream_id, num_tokens in zip(frame.stream_ids[:], frame.num_tokens[:], strict=True):
            if (choice := self._choices.get(stream_id)) is not None:
                choice.on_delivered(num_tokens)

    def take(self, frame: GatewayFrame) -> None:
        """Does what a gateway's frame asks for, cancels first."""
        early = [cancel for cancel in frame.cancels if not self._cancel(cancel)]
        for kept in frame.keeps:
            self._contexts[kept.stream_id] = self._contexts.get(kept.stream_id, b"") + kept.context
        for opening in frame.opens:
            self._open(opening)
        for part in frame.parts:
            self._extend(part)
        for cancel in early:
            self._cancel(cancel)
        self._grant(frame.credits)
        self._probe(frame.probed)
        self._usage.on_recorded(self.gateway, frame.recorded)
        for left in frame.let_go:
            self._leave_for_later(left)
        for attach in frame.attaches:
            self._attach(attach)

    def _open(self, opening: Open) -> None:
        stream_ids = list(opening.add.stream_ids)
        context = self._contexts.pop(stream_ids[0], b"") if stream_ids else b""
        if (
            not stream_ids
            or len({*stream_ids}) < len(stream_ids)
            or not self._choices.keys().isdisjoint(stream_ids)
        ):
            # A refusal of a stream id that is taken would end the stream that has it.
            self._refuse(
                [each for each in stream_ids if each not in self._choices], "stream ids are taken"
            )
        elif self._refusal is not None:
            self._refuse(
                stream_ids, self._refusal, cause=common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING
            )
        elif (fault := self._fault_of(opening)) is not None:
            self._refuse(stream_ids, fault)
        else:
            self._start(opening, context)

    def _fault_of(self, opening: Open) -> str | None:
        add = opening.add
        if (unknown := unknown_parser(opening.answer_format)) is not None:
            return f"the parser {unknown!r} is not known here"
        if opening.model not in self._tokenizers:
            return f"the model {opening.model!r} has no tokenizer here"
        if add.choice_indices and len(add.choice_indices) != len(add.stream_ids):
            return "choice_indices are not one a stream"
        if add.num_output_tokens and len(add.stream_ids) > 1:
            return "output_ids belong to one choice; allowed: one stream"
        return None

    def _start(self, opening: Open, context: bytes) -> None:
        """Sends a request to its engine."""
        add = opening.add
        log = self._logs.begin(self, opening, context) if opening.resumable else None
        streams = self._streams_of(opening, log)
        record = self._usage.open(self.gateway, opening, streams)
        link = self._links.to(opening.engine_address)
        span = self._begin_span(opening)
        request = RunningRequest(link, opening, streams, span)
        for choice in request.choices:
            choice.attach(choice.stream_id, self._on_choice_end)
            self._choices[choice.stream_id] = choice
        if log is not None:
            log.on_opened(request.choices, record)
            self._register(log)
        self._incomplete[request.first_id] = request
        request.replay(list(add.output_ids))
        self._forget_if_complete(request)

    def _streams_of(self, opening: Open, log: StreamLog | None) -> list[OutputStream]:
        add = opening.add
        plan = TextPlan.of(add, self._tokenizers[opening.model].table, _format_of(opening))
        sink: Sink = self.outbox if log is None else log
        numbered = zip(
            add.stream_ids, add.choice_indices or range(len(add.stream_ids)), strict=True
        )
        # A log knows its choices by index: their stream ids are other ones for each reader.
        return [
            OutputStream(sink, stream_id if log is None else index, plan, add.credit, index)
            for stream_id, index in numbered
        ]

    def _begin_span(self, opening: Open) -> Span:
        """Begins the request's span here; the engine's span comes below it."""
        add = opening.add
        fields = {
            "headwater.request_id": add.request_id,
            "attempt": add.attempt,
            "engine": opening.replica_id,
        }
        model = {"gen_ai.request.model": opening.model}
        span = self._tracing.begin("output", add.traceparent, add.tracestate, **fields, **model)
        add.traceparent = span.context.traceparent
        add.tracestate = span.context.tracestate
        structlog.get_logger().debug(
            "stream opened",
            trace_id=span.context.trace_id,
            tenant=add.tenant,
            model=opening.model,
            **fields,
        )
        return span

    def _extend(self, part: AddPart) -> None:
        # Parts of a request that was refused or cancelled still come for a while.
        if (request := self._incomplete.get(part.stream_id)) is not None:
            request.extend(part)
            self._forget_if_complete(request)

    def _forget_if_complete(self, request: RunningRequest) -> None:
        if (request.is_complete or request.has_ended) and self._incomplete.get(
            request.first_id
        ) is request:
            del self._incomplete[request.first_id]

    def _grant(self, granted: Iterable[Credit]) -> None:
        for credit in granted:
            if (choice := self._choices.get(credit.stream_id)) is not None:
                choice.grant(credit.tokens)

    def _cancel(self, cancel: Cancel) -> bool:
        """False when there is no such stream."""
        self._contexts.pop(cancel.stream_id, None)
        if (choice := self._choices.get(cancel.stream_id)) is None:
            return False
        choice.abandon(cancel.reason or "cancelled")
        return True

    def _cancel_all(self, reason: str) -> None:
        for choice in list(self._choices.values()):
            choice.abandon(reason)

    def _probe(self, stream_ids: Sequence[int]) -> None:
        """Answers a probe, and ends streams that are unknown here; engines end those that they do
        not have."""
        if stream_ids:
            self.outbox.answer()
        missing = [stream_id for stream_id in stream_ids if stream_id not in self._choices]
        for stream_id in stream_ids:
            if (choice := self._choices.get(stream_id)) is not None:
                choice.probe()
        if missing:
            structlog.get_logger().warning(
                "streams that were asked for are not here", stream_ids=missing
            )
            self._refuse(
                missing,
                "the output processor does not have it",
                cause=common_pb2.LOSS_CAUSE_MISSING,
            )

    def _refuse(
        self,
        stream_ids: list[int],
        error: str,
        *,
        cause: common_pb2.LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED,
        retriable: bool | None = None,
    ) -> None:
        """Refuses streams; with a cause the error is retriable, unless `retriable` says
        otherwise."""
        for stream_id in stream_ids:
            finish = OutputFinish(
                stream_id=stream_id, reason=common_pb2.FINISH_REASON_ERROR, error=error, cause=cause
            )
            finish.retriable = (
                cause != common_pb2.LOSS_CAUSE_UNSPECIFIED if retriable is None else retriable
            )
            self.outbox.add_finish(finish)

    def _on_choice_end(self, choice: RunningChoice) -> None:
        del self._choices[choice.stream_id]
        self._forget_if_complete(choice.request)
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self._refusal is not None and not self._choices:
            self.end()

    def _attach(self, attach: Attach) -> None:
        """Continues streams of another session, or of an earlier reader."""
        log = self._logs.find(attach.request_id, attach.tenant)
        stream_ids = list(attach.stream_ids)
        if (
            log is None
            or log.num_choices != len(stream_ids)
            or not self._choices.keys().isdisjoint(stream_ids)
        ):
            self._refuse(stream_ids, "the stream is no longer kept")
            return
        for stream_id, choice in log.attach(self, stream_ids, attach.record_id).items():
            choice.attach(stream_id, self._on_choice_end)
            self._choices[stream_id] = choice
        self._register(log)
        log.replay()

    def _leave_for_later(self, left: LetGo) -> None:
        """Ends streams that the gateway no longer reads; requests with a log stay for their next
        reader."""
        for stream_id in left.stream_ids:
            if (log := self._read_logs.get(stream_id)) is not None:
                self._detach(log, (left.prompt_tokens, left.output_tokens))
        for stream_id in left.stream_ids:
            self._cancel(Cancel(stream_id=stream_id, reason="client_gone"))

    def _detach(self, log: StreamLog, charged: tuple[int, int] | None) -> None:
        """Keeps a request for its next reader; a request whose parts have not all arrived is
        ended."""
        self._unregister(log)
        for choice in log.running:
            if choice.request.is_complete:
                del self._choices[choice.stream_id]
            else:
                choice.abandon("gateway_gone")
        log.detach(charged)
        self._end_if_left()

    def on_log_taken(self, log: StreamLog) -> None:
        """Another reader goes on with the log and its choices."""
        self._unregister(log)
        error = "another reader goes on with the stream"
        self._refuse(log.open_ids, error, cause=common_pb2.LOSS_CAUSE_TAKEN_OVER, retriable=False)
        for choice in log.running:
            del self._choices[choice.stream_id]

    def on_log_dropped(self, log: StreamLog) -> None:
        """The log's choices cannot be resumed any longer."""
        self._unregister(log)

    def _register(self, log: StreamLog) -> None:
        """Finds the log by its present stream ids from now on, and by no earlier ones."""
        self._unregister(log)
        if log.is_kept:
            self._log_ids[log] = [stream_id for stream_id in log.stream_ids if stream_id]
            self._read_logs.update(dict.fromkeys(self._log_ids[log], log))

    def _unregister(self, log: StreamLog) -> None:
        for stream_id in self._log_ids.pop(log, ()):
            # Another request may have the stream id by now.
            if self._read_logs.get(stream_id) is log:
                del self._read_logs[stream_id]


def _format_of(opening: Open) -> AnswerFormat | None:
    return opening.answer_format if opening.HasField("answer_format") else None
