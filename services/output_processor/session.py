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
from headwater.proto.output_processor_pb2 import GatewayFrame, Open, OutputFinish, OutputFrame
from headwater.services.answers.parser import unknown_parser
from headwater.services.output_processor import metrics as output_metrics
from headwater.services.output_processor.engines import EngineLink, EngineLinks, Request
from headwater.services.output_processor.frames import Outbox
from headwater.services.output_processor.stream import OutputStream, TextPlan
from headwater.services.runtime import owned_task
from headwater.services.text.tokenizer import Tokenizer
from headwater.services.tracing import NO_TRACING, Span, Tracing


@dataclass(slots=True)
class _Place:
    """Where a stream is computed."""

    link: EngineLink
    number: int
    stream: OutputStream
    opened: _Opened


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


class GatewaySession:
    """`tokenizers` by the names of the models that they belong to."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer], links: EngineLinks, tracing: Tracing = NO_TRACING) -> None:
        self._tokenizers, self._links, self._tracing = tokenizers, links, tracing
        self._places: dict[int, _Place] = {}
        """By the gateway's stream id."""
        self._opened: dict[int, _Opened] = {}
        """Requests whose parts are still coming, by the gateway's id of their first stream."""
        self._outbox = Outbox()
        self._refusal: str | None = None
        self._is_over = False

    @property
    def num_streams(self) -> int:
        return len(self._places)

    async def run(self, incoming: AsyncIterator[GatewayFrame]) -> AsyncIterator[OutputFrame]:
        """What the gateway hears, until it leaves. Its streams do not outlive it."""
        try:
            async with owned_task(self._read(incoming)) as reading:
                reading.add_done_callback(lambda _: self.end())
                while not self._is_over:
                    await self._outbox.filled.wait()
                    self._outbox.filled.clear()
                    for frame in self._outbox.frames():
                        output_metrics.GATEWAY_FRAMES.inc()
                        yield frame
        finally:
            self._cancel_all("gateway_gone")

    async def _read(self, incoming: AsyncIterator[GatewayFrame]) -> None:
        async for frame in incoming:
            self.take(frame)

    def take(self, frame: GatewayFrame) -> None:
        """Everything a gateway's frame asks for, cancels first."""
        early = [cancel for cancel in frame.cancels if not self._cancel(cancel)]
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

    def leave(self, reason: str) -> None:
        """Refuses new streams from now on; the session ends with the last one that runs."""
        self._refusal = reason
        if not self._places:
            self.end()

    def end(self) -> None:
        """Ends the session after what is queued."""
        self._is_over = True
        self._outbox.filled.set()

    def _open(self, opening: Open) -> None:
        add, stream_ids = opening.add, list(opening.add.stream_ids)
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
            streams = [
                OutputStream(each, plan, self._outbox, add.credit, self._forget, choice_index)
                for each, choice_index in zip(stream_ids, add.choice_indices or range(len(stream_ids)), strict=True)
            ]
            link = self._links.to(opening.engine_address)
            self._expect(link, opening, streams)

    def _expect(self, link: EngineLink, opening: Open, streams: list[OutputStream]) -> None:
        """What an `Open` lacks comes in parts; what it resumes is replayed as it comes."""
        add, output_ids = opening.add, list(opening.add.output_ids)
        told = {"headwater.request_id": add.request_id, "attempt": add.attempt, "engine": opening.replica_id}
        span = self._tracing.begin("output", add.traceparent, **told)
        add.traceparent = span.context.traceparent
        structlog.get_logger().debug(
            "stream opened", trace_id=span.context.trace_id, tenant=add.tenant, model=opening.model, **told
        )
        request = link.open(opening, streams)
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
            self._places[stream.stream_id] = _Place(link, number, stream, opened)
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
        if (place := self._places.get(cancel.stream_id)) is None:
            return False
        place.link.cancel(place.number, cancel.reason or "cancelled")
        place.stream.cancel()
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

    def _cancel_all(self, reason: str) -> None:
        for stream_id in list(self._places):
            self._cancel(Cancel(stream_id=stream_id, reason=reason))

    def _refuse(
        self,
        stream_ids: list[int],
        error: str,
        *,
        cause: common_pb2.LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED,
    ) -> None:
        for stream_id in stream_ids:
            finish = OutputFinish(stream_id=stream_id, reason=common_pb2.FINISH_REASON_ERROR, error=error, cause=cause)
            finish.retriable = cause != common_pb2.LOSS_CAUSE_UNSPECIFIED
            self._outbox.add_finish(finish)

    def _forget(self, stream: OutputStream) -> None:
        opened = self._places.pop(stream.stream_id).opened
        output_metrics.STREAMS.dec()
        opened.num_running -= 1
        if not opened.num_running:
            self._opened.pop(opened.first, None)
            opened.span.end()
        if self._refusal is not None and not self._places:
            self.end()


def _format_of(opening: Open) -> AnswerFormat | None:
    return opening.answer_format if opening.HasField("answer_format") else None
