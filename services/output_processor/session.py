"""One Session with a gateway: its requests go to their engines, their text comes back in one stream of frames.

Reading never waits for writing. Knows which stream is at which engine; knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from headwater.proto import common_pb2
from headwater.proto.common_pb2 import AnswerFormat
from headwater.proto.engine_pb2 import AddPart, Cancel
from headwater.proto.output_processor_pb2 import Attach, GatewayFrame, LetGo, Open, OutputFinish, OutputFrame
from headwater.services.answers.parser import unknown_parser
from headwater.services.gateway_identity import NOBODY, Gateway
from headwater.services.output_processor import metrics as output_metrics
from headwater.services.output_processor.engines import EngineLink, EngineLinks, Request
from headwater.services.output_processor.frames import Outbox
from headwater.services.output_processor.stream import OutputStream, TextPlan
from headwater.services.output_processor.stream_log import StreamLog
from headwater.services.output_processor.stream_logs import StreamLogs
from headwater.services.runtime import owned_task
from headwater.services.text.tokenizer import Tokenizer
from headwater.services.tracing import NO_TRACING, Span, Tracing


@dataclass(slots=True)
class Place:
    """Where a stream is computed."""

    link: EngineLink
    number: int
    stream: OutputStream
    opened: _Opened

    def abandon(self, reason: str) -> None:
        """Ends it, here and at its engine."""
        self.link.cancel(self.number, reason)
        self.stream.cancel()


@dataclass(slots=True)
class _Opened:
    """A request of which parts may still come; `resumed` is the choice that goes on, if one does."""

    link: EngineLink
    request: Request
    first: int
    """The gateway's id of its first stream: parts name it."""
    num_running: int
    num_missing_prompt: int
    num_missing_output: int
    num_missing_grammar: int
    """Bytes."""
    resumed: OutputStream | None
    delivered_bytes: int
    span: Span

    def one_ended(self) -> bool:
        """Whether it was the last of them."""
        output_metrics.STREAMS.dec()
        self.num_running -= 1
        if not self.num_running:
            self.span.end()
        return not self.num_running


class GatewaySession:
    """`tokenizers` by the names of the models that they belong to."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        links: EngineLinks,
        tracing: Tracing = NO_TRACING,
        logs: StreamLogs | None = None,
        gateway: Gateway = NOBODY,
    ) -> None:
        self._tokenizers, self._links, self._tracing = tokenizers, links, tracing
        self._logs, self.gateway = logs if logs is not None else StreamLogs(), gateway
        self._logged: dict[int, StreamLog] = {}
        """That this session reads, by each of its streams' ids."""
        self._kept: dict[int, bytes] = {}
        """What gateways need to go on with requests that are about to be opened, by their first stream's id."""
        self._places: dict[int, Place] = {}
        """By the gateway's stream id."""
        self._opened: dict[int, _Opened] = {}
        """Requests whose parts are still coming, by the gateway's id of their first stream."""
        self.outbox = Outbox()
        self._refusal: str | None = None
        self._is_over = False

    @property
    def num_streams(self) -> int:
        return len(self._places)

    async def run(self, incoming: AsyncIterator[GatewayFrame]) -> AsyncIterator[OutputFrame]:
        """What the gateway hears, until it leaves. Its streams do not outlive it, but for those that can be resumed."""
        bills = self._logs.bills
        bills.joined(self.gateway)
        try:
            async with owned_task(self._read(incoming)) as reading:
                reading.add_done_callback(lambda _: self.end())
                while not self._is_over:
                    await self.outbox.filled.wait()
                    self.outbox.filled.clear()
                    for frame in self.outbox.frames():
                        output_metrics.GATEWAY_FRAMES.inc()
                        yield frame
                        self._left(frame)
        finally:
            for log in dict.fromkeys(self._logged.values()):
                self._let_go(log, None)
            self._cancel_all("gateway_gone")
            bills.parted(self.gateway)

    def _left(self, frame: OutputFrame) -> None:
        """The gateway's connection has taken a frame."""
        for stream_id, count in zip(frame.stream_ids[:], frame.num_tokens[:], strict=True):
            if (place := self._places.get(stream_id)) is not None:
                place.link.told(place.number, count)

    async def _read(self, incoming: AsyncIterator[GatewayFrame]) -> None:
        async for frame in incoming:
            self.take(frame)

    def take(self, frame: GatewayFrame) -> None:
        """Everything a gateway's frame asks for, cancels first."""
        early = [cancel for cancel in frame.cancels if not self._cancel(cancel)]
        for kept in frame.keeps:
            self._kept[kept.stream_id] = self._kept.get(kept.stream_id, b"") + kept.context
        for opening in frame.opens:
            self._open(opening)
        for part in frame.parts:
            self._extend(part)
        for cancel in early:
            self._cancel(cancel)
        for credit in frame.credits:
            if (place := self._places.get(credit.stream_id)) is not None:
                place.stream.grant(credit.tokens)
                place.link.grant(place.number, credit.tokens)
        self._ask(frame.asked)
        self._logs.bills.recorded(self.gateway, frame.recorded)
        for said in frame.let_go:
            self._leave_for_later(said)
        for attach in frame.attaches:
            self._attach(attach)

    def leave(self, reason: str) -> None:
        """Refuses new streams from now on; the session ends with the last one that runs."""
        self._refusal = reason
        if not self._places:
            self.end()

    def end(self) -> None:
        """Ends the session after what is queued."""
        self._is_over = True
        self.outbox.filled.set()

    def _open(self, opening: Open) -> None:
        add, stream_ids = opening.add, list(opening.add.stream_ids)
        context = self._kept.pop(stream_ids[0], b"") if stream_ids else b""
        if not stream_ids or len({*stream_ids}) < len(stream_ids) or not self._places.keys().isdisjoint(stream_ids):
            # Of streams that are taken nothing can be said without ending them.
            self._refuse([each for each in stream_ids if each not in self._places], "stream ids are taken")
        elif self._refusal is not None:
            self._refuse(stream_ids, self._refusal, cause=common_pb2.LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING)
        elif (unknown := unknown_parser(opening.answer_format)) is not None:
            self._refuse(stream_ids, f"the parser {unknown!r} is not known here")
        elif (tokenizer := self._tokenizers.get(opening.model)) is None:
            self._refuse(stream_ids, f"the model {opening.model!r} has no tokenizer here")
        elif add.choice_indices and len(add.choice_indices) != len(stream_ids):
            self._refuse(stream_ids, "choice_indices are not one a stream")
        elif add.num_output_tokens and len(stream_ids) > 1:
            self._refuse(stream_ids, "output_ids belong to one choice; allowed: one stream")
        else:
            plan = TextPlan.of(add, tokenizer.table, _format_of(opening))
            log = self._logs.begin(self, opening, context) if opening.resumable else None
            streams = [
                OutputStream(each, plan, log or self.outbox, add.credit, self._forget, choice_index)
                for each, choice_index in zip(stream_ids, add.choice_indices or range(len(stream_ids)), strict=True)
            ]
            bill = self._logs.bills.opened(self.gateway, opening, streams)
            if log is not None:
                log.runs(streams, bill)
            link = self._links.to(opening.engine_address)
            self._expect(link, opening, streams)

    def _expect(self, link: EngineLink, opening: Open, streams: list[OutputStream]) -> None:
        """What an `Open` lacks comes in parts; what it resumes is replayed as it comes."""
        add, output_ids = opening.add, list(opening.add.output_ids)
        told = {"headwater.request_id": add.request_id, "attempt": add.attempt, "engine": opening.replica_id}
        span = self._tracing.begin("output", add.traceparent, add.tracestate, **told)
        add.traceparent, add.tracestate = span.context.traceparent, span.context.tracestate
        structlog.get_logger().debug(
            "stream opened", trace_id=span.context.trace_id, tenant=add.tenant, model=opening.model, **told
        )
        # One that can be resumed goes on while no gateway is told.
        request = link.open(opening, streams, is_paced=not opening.resumable)
        opened = _Opened(
            link=link,
            request=request,
            first=streams[0].stream_id,
            num_running=len(streams),
            num_missing_prompt=add.num_prompt_tokens - len(add.prompt_ids),
            num_missing_output=add.num_output_tokens,
            num_missing_grammar=add.num_grammar_bytes - len(add.grammar),
            resumed=streams[0] if add.num_output_tokens else None,
            delivered_bytes=opening.delivered_bytes[0] if opening.delivered_bytes else 0,
            span=span,
        )
        for number, stream in request.streams.items():
            self._places[stream.stream_id] = Place(link, number, stream, opened)
        output_metrics.STREAMS.inc(len(streams))
        self._opened[opened.first] = opened
        self._arrived(opened, output_ids)

    def _extend(self, part: AddPart) -> None:
        # A part of a request that was refused or cancelled is nobody's.
        if (opened := self._opened.get(part.stream_id)) is None:
            return
        opened.num_missing_prompt -= len(part.prompt_ids)
        opened.num_missing_grammar -= len(part.grammar)
        output_ids = list(part.output_ids)
        opened.link.extend(opened.request, part)
        self._arrived(opened, output_ids)

    def _arrived(self, opened: _Opened, output_ids: list[int]) -> None:
        if opened.resumed is not None and output_ids and not opened.resumed.ended:
            opened.num_missing_output -= len(output_ids)
            opened.resumed.replay(output_ids)
            if opened.num_missing_output <= 0:
                opened.resumed.resume(opened.delivered_bytes)
            if opened.resumed.ended:
                opened.link.cancel(opened.request.first, "nothing_to_resume")
        if max(opened.num_missing_prompt, opened.num_missing_output, opened.num_missing_grammar) <= 0:
            self._opened.pop(opened.first, None)

    def _cancel(self, cancel: Cancel) -> bool:
        """False when there is no such stream."""
        self._kept.pop(cancel.stream_id, None)
        if (place := self._places.get(cancel.stream_id)) is None:
            return False
        place.abandon(cancel.reason or "cancelled")
        return True

    def _ask(self, stream_ids: Sequence[int]) -> None:
        """Ends those that are not here; whether engines have the others is theirs to say."""
        missing = []
        for stream_id in stream_ids:
            if (place := self._places.get(stream_id)) is not None:
                place.link.ask(place.number)
            else:
                missing.append(stream_id)
        if missing:
            structlog.get_logger().warning("streams that were asked for are not here", stream_ids=missing)
            self._refuse(missing, "the output processor does not have it", cause=common_pb2.LOSS_CAUSE_MISSING)

    def _attach(self, attach: Attach) -> None:
        """Goes on with what another session carried, or an earlier reader of this one."""
        log, stream_ids = self._logs.find(attach.request_id, attach.tenant), list(attach.stream_ids)
        if log is None or log.num_choices != len(stream_ids) or not self._places.keys().isdisjoint(stream_ids):
            self._refuse(stream_ids, "the stream is no longer kept")
            return
        for stream_id, place in log.take_over(self, stream_ids, attach.record_id).items():
            place.stream.belong_to(stream_id, self._forget)
            self._places[stream_id] = place
        log.tell()

    def _leave_for_later(self, said: LetGo) -> None:
        """What is not kept ends."""
        for stream_id in said.stream_ids:
            if (log := self._logged.get(stream_id)) is not None:
                self._let_go(log, said)
        for stream_id in said.stream_ids:
            self._cancel(Cancel(stream_id=stream_id, reason="client_gone"))

    def reads(self, log: StreamLog, stream_id: int, before: int | None) -> None:
        """A choice of it goes by that number from now on, in place of the one before."""
        if before is not None:
            self._logged.pop(before, None)
        self._logged[stream_id] = log

    def forget(self, log: StreamLog) -> None:
        """It cannot be resumed any longer, or not by this session: nothing that is said here is about it."""
        for stream_id in log.stream_ids:
            self._logged.pop(stream_id, None)

    def _let_go(self, log: StreamLog, said: LetGo | None) -> None:
        """Leaves a request to whoever comes for it, unless parts of it never came."""
        self.forget(log)
        places = {stream_id: self._places[stream_id] for stream_id in log.stream_ids if stream_id in self._places}
        for stream_id, place in list(places.items()):
            if place.opened.first in self._opened:
                del places[stream_id]
                place.abandon("gateway_gone")
        for stream_id in places:
            del self._places[stream_id]
        log.let_go(places, said)
        self._end_if_left()

    def give_up(self, log: StreamLog) -> dict[int, Place]:
        """Another reader takes it over: the choices that run, by their ids here."""
        self.forget(log)
        gone = "another reader goes on with the stream"
        self._refuse(log.open_ids, gone, cause=common_pb2.LOSS_CAUSE_TAKEN_OVER, retriable=False)
        return {stream_id: self._places.pop(stream_id) for stream_id in log.stream_ids if stream_id in self._places}

    def _cancel_all(self, reason: str) -> None:
        for stream_id in list(self._places):
            self._cancel(Cancel(stream_id=stream_id, reason=reason))

    def _refuse(
        self,
        stream_ids: list[int],
        error: str,
        *,
        cause: common_pb2.LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED,
        retriable: bool | None = None,
    ) -> None:
        """With a cause it is retriable, unless said otherwise."""
        for stream_id in stream_ids:
            finish = OutputFinish(stream_id=stream_id, reason=common_pb2.FINISH_REASON_ERROR, error=error, cause=cause)
            finish.retriable = cause != common_pb2.LOSS_CAUSE_UNSPECIFIED if retriable is None else retriable
            self.outbox.add_finish(finish)

    def _forget(self, stream: OutputStream) -> None:
        opened = self._places.pop(stream.stream_id).opened
        if opened.one_ended():
            self._opened.pop(opened.first, None)
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self._refusal is not None and not self._places:
            self.end()


def _format_of(opening: Open) -> AnswerFormat | None:
    return opening.answer_format if opening.HasField("answer_format") else None
