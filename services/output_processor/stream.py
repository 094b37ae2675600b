"""One choice of a request on its way to its gateway: tokens in, text out. Knows nothing about connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headwater.proto import common_pb2
from headwater.proto.common_pb2 import AnswerFormat, Embedding, FinishReason, LossCause, ToolCallDelta
from headwater.proto.engine_pb2 import Add, Finish, PromptLogprobs, Start
from headwater.proto.output_processor_pb2 import OutputFinish, RowParts
from headwater.services.answers.parser import AnswerParser, call_id, markers_of
from headwater.services.answers.parts import CallDelta, Parts
from headwater.services.output_processor import metrics as output_metrics
from headwater.services.output_processor.detokenizer import Detokenizer
from headwater.services.output_processor.frames import Outbox
from headwater.services.output_processor.stops import StopMatcher, Stops
from headwater.services.output_processor.stream_log import StreamLog
from headwater.services.output_processor.token_logprobs import Entry, prompt_parts, token_logprob
from headwater.services.text.token_table import TokenTable

CREDIT_SLACK = 256
"""Tokens past its credit that a stream is forgiven: an engine plans some steps ahead."""
MAX_ERROR_CHARS = 4096
MAX_TEXT_CHARS = 8192
"""Of a row; longer text (that was held back, or is resumed) goes in several."""
MAX_ROW_TOKENS, MAX_SCORED_ROW_TOKENS = 256, 8
"""Without and with log probabilities: what keeps a row far below a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """How the text of a request's choices is made; one for all of them."""

    table: TokenTable
    skip_special_tokens: bool
    stops: Stops | None
    min_tokens: int
    """Before so many tokens stop strings are not looked for."""
    silent_ids: frozenset[int]
    """Ids that end the answer and are no part of its text."""
    reported_ids: frozenset[int]
    """Ids that are named when they end the answer: those asked for, not the plain end of sequence."""
    wants_logprobs: bool
    max_row_tokens: int
    request_id: str
    answer_format: AnswerFormat | None
    """None: all of the text is content."""

    @classmethod
    def of(cls, add: Add, table: TokenTable, answer_format: AnswerFormat | None = None) -> TextPlan:
        sampling = add.sampling
        eos = frozenset[int]() if sampling.ignore_eos else frozenset(add.eos_token_ids)
        asked = frozenset(sampling.stop_token_ids)
        with_stop = sampling.include_stop_str_in_output
        return cls(
            table=table,
            skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
            stops=Stops.compile(sampling.stop, include_in_output=with_stop) if sampling.stop else None,
            min_tokens=sampling.min_tokens,
            silent_ids=frozenset() if with_stop else asked | eos,
            reported_ids=asked - eos,
            wants_logprobs=sampling.logprobs,
            max_row_tokens=MAX_SCORED_ROW_TOKENS if sampling.logprobs else MAX_ROW_TOKENS,
            request_id=add.request_id,
            answer_format=answer_format,
        )

    def new_detokenizer(self) -> Detokenizer:
        shown = markers_of(self.answer_format) if self.answer_format is not None else ()
        return Detokenizer(self.table, skip_special_tokens=self.skip_special_tokens, shown=shown)


class OutputStream:
    """Reports to `outbox` under the gateway's `stream_id`, calls `on_end` when it ends and says nothing more then."""

    __slots__ = (
        "_choice_index",
        "_detokenizer",
        "_granted",
        "_matcher",
        "_next_index",
        "_num_reasoning_tokens",
        "_offset",
        "_on_end",
        "_parser",
        "_plan",
        "_replayed",
        "cached_tokens",
        "ended",
        "outbox",
        "stream_id",
    )

    def __init__(
        self,
        stream_id: int,
        plan: TextPlan,
        outbox: Outbox | StreamLog,
        credit: int,
        on_end: Callable[[OutputStream], None],
        choice_index: int = 0,
    ) -> None:
        self.stream_id, self.outbox = stream_id, outbox
        self._plan, self._on_end, self._choice_index = plan, on_end, choice_index
        self._detokenizer = plan.new_detokenizer()
        self._matcher = StopMatcher(plan.stops) if plan.stops is not None else None
        self._parser = AnswerParser(plan.answer_format) if plan.answer_format is not None else None
        self._num_reasoning_tokens = 0
        self._next_index = 0
        self._offset = 0
        """UTF-8 bytes of text so far."""
        self._granted = credit + CREDIT_SLACK
        self._replayed: list[tuple[int, bytes]] = []
        """Numbers of tokens, and the text that each made certain."""
        self.ended = False
        self.cached_tokens = 0
        """Of its prompt."""

    def push(
        self, first: int, token_ids: list[int], entries: Mapping[int, Entry] | None = None, position: int = 0
    ) -> None:
        """Tokens from output index `first` on; `entries` has their log probabilities from `position` on."""
        if first != self._next_index:
            error = f"tokens from {first} on came where {self._next_index} was next"
            self.fail(error, cause=common_pb2.LOSS_CAUSE_FAULT)
        elif len(token_ids) <= self._most_row_tokens:
            self._push_row(token_ids, entries, position)
        else:
            for start in range(0, len(token_ids), self._most_row_tokens):
                if not self.ended:
                    row = token_ids[start : start + self._most_row_tokens]
                    self._push_row(row, entries, position + start)

    @property
    def _most_row_tokens(self) -> int:
        """One where calls end an answer and thoughts are counted: it matters which token's text does so, and an engine
        says several at once where drafts are right."""
        return self._plan.max_row_tokens if self._parser is None else 1

    def _push_row(self, token_ids: list[int], entries: Mapping[int, Entry] | None, position: int) -> None:
        try:
            num_used, text = self._spell(token_ids)
        except IndexError:
            self.fail(f"an id of {token_ids} is outside the vocabulary")
            return
        used = token_ids if num_used == len(token_ids) else token_ids[:num_used]
        self._send(used, text)
        self._next_index += num_used
        if entries is not None and self._plan.wants_logprobs:
            self._send_logprobs(used, entries, position)
        if self.is_stopped:
            self._end_early()
        elif self._next_index > self._granted:
            error = f"{self._next_index} tokens came for a credit of {self._granted - CREDIT_SLACK}"
            self.fail(error, cause=common_pb2.LOSS_CAUSE_FAULT)

    def _spell(self, token_ids: list[int]) -> tuple[int, str]:
        """How many of the tokens count, and the text that they make certain."""
        num_spelled = len(token_ids)
        if token_ids[-1] in self._plan.silent_ids:
            num_spelled -= 1
        if self._matcher is None:
            spelled = token_ids if num_spelled == len(token_ids) else token_ids[:num_spelled]
            return len(token_ids), self._detokenizer.push_all(spelled)
        text = ""
        for i in range(num_spelled):
            piece = self._detokenizer.push(token_ids[i])
            text += piece if self._next_index + i < self._plan.min_tokens else self._matcher.push(piece)
            if self._matcher.hit is not None:
                return i + 1, text
        return len(token_ids), text

    def _send(self, token_ids: Sequence[int], text: str) -> None:
        """A row; what of a long text does not fit goes ahead of its tokens."""
        if self._parser is not None:
            parts = self._parser.push(text)
            self._num_reasoning_tokens += len(token_ids) if self._parser.is_reasoning else 0
            self._send_parts(token_ids, parts, _num_bytes(text))
            return
        while len(text) > MAX_TEXT_CHARS:
            self._send_row((), text[:MAX_TEXT_CHARS])
            text = text[MAX_TEXT_CHARS:]
        self._send_row(token_ids, text)

    def _send_row(self, token_ids: Sequence[int], text: str) -> None:
        num_bytes = _num_bytes(text)
        self.outbox.add_row(self.stream_id, self._next_index, token_ids, text, self._offset, num_bytes)
        self._offset += num_bytes

    def _send_parts(self, token_ids: Sequence[int], parts: Parts, num_bytes: int) -> None:
        """What a text of so many bytes was told apart into. Rows before the last one stand for none of it."""
        *ahead, last = parts.within(MAX_TEXT_CHARS)
        for part in ahead:
            self._send_part((), part, 0)
        self._send_part(token_ids, last, num_bytes)

    def _send_part(self, token_ids: Sequence[int], part: Parts, num_bytes: int) -> None:
        content_bytes = _num_bytes(part.content)
        self.outbox.add_row(self.stream_id, self._next_index, token_ids, part.content, self._offset, content_bytes)
        self._offset += num_bytes
        if not part.is_plain or content_bytes != num_bytes:
            calls = list(self._named(part.calls))
            self.outbox.add_parts(RowParts(num_bytes=num_bytes, reasoning=part.reasoning, tool_calls=calls))

    def _named(self, calls: Sequence[CallDelta]) -> Iterator[ToolCallDelta]:
        plan = self._plan
        assert plan.answer_format is not None
        for call in calls:
            # A call begins with its name.
            name_of = call_id(plan.answer_format, plan.request_id, self._choice_index, call.index) if call.name else ""
            said = {"input" if call.is_text else "arguments": call.arguments}
            yield ToolCallDelta(index=call.index, id=name_of, name=call.name, **said)

    def _send_logprobs(self, token_ids: Sequence[int], entries: Mapping[int, Entry], position: int) -> None:
        """Of the row that was sent last."""
        scored = ((token_id, entries.get(position + i)) for i, token_id in enumerate(token_ids))
        self.outbox.add_logprobs(
            [token_logprob(self._plan.table, token_id, entry) for token_id, entry in scored if entry is not None]
        )

    def replay(self, token_ids: list[int]) -> None:
        """Tokens that an earlier attempt has already delivered: they make text, but nothing is sent."""
        if self.is_stopped:
            return
        # Where thoughts are counted, it matters which token's text is one.
        rows = [token_ids] if self._parser is None else [[token_id] for token_id in token_ids]
        try:
            for row in rows:
                num_used, text = self._spell(row)
                self._next_index += num_used
                self._granted += num_used
                self._replayed.append((num_used, text.encode()))
        except IndexError:
            self.fail(f"an id of {token_ids} is outside the vocabulary")

    def resume(self, delivered_bytes: int) -> None:
        """Goes on after the replay: from the text that the gateway has not had yet."""
        num_spelled = sum(len(text) for _, text in self._replayed)
        if delivered_bytes > num_spelled:
            self.fail(f"delivered_bytes is {delivered_bytes}; allowed: 0…{num_spelled}, what output_ids spell")
            return
        self._offset = delivered_bytes
        parts, num_bytes = self._untold(delivered_bytes)
        if num_bytes and self._parser is not None:
            self._send_parts((), parts, num_bytes)
        elif num_bytes:
            self._send((), parts.content)
        if self.is_stopped:
            self._end_early()

    def _untold(self, num_told: int) -> tuple[Parts, int]:
        """What of the replayed text comes after its first bytes, and how many bytes that are."""
        untold, num_bytes = Parts(), 0
        for num_tokens, spelled in self._replayed:
            told, rest = spelled[:num_told].decode(errors="ignore"), spelled[num_told:].decode(errors="ignore")
            num_told, num_bytes = max(0, num_told - len(spelled)), num_bytes + _num_bytes(rest)
            if self._parser is None:
                untold.add(Parts(rest))
                continue
            # The gateway has had whatever was told of that text.
            self._parser.push(told)
            if rest:
                untold.add(self._parser.push(rest))
            self._num_reasoning_tokens += num_tokens if self._parser.is_reasoning else 0
        self._replayed = []
        return untold, num_bytes

    def grant(self, tokens: int) -> None:
        self._granted += tokens

    @property
    def num_tokens(self) -> int:
        """Of its answer so far."""
        return self._next_index

    @property
    def credit(self) -> int:
        """Output index up to which tokens may come."""
        return self._granted - CREDIT_SLACK

    def belong_to(self, stream_id: int, on_end: Callable[[OutputStream], None]) -> None:
        """From now on it is another session's, or nobody's for a time."""
        self.stream_id, self._on_end = stream_id, on_end

    def start(self, start: Start) -> None:
        start.stream_id, self.cached_tokens = self.stream_id, start.cached_tokens
        self.outbox.add_start(start)

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        for each in prompt_parts(self._plan.table, part, self.stream_id):
            self.outbox.add_prompt_part(each)

    def add_embedding(self, embedding: Embedding) -> None:
        embedding.stream_id = self.stream_id
        self.outbox.add_embedding(embedding)

    def finish(self, finish: Finish) -> None:
        """The engine ended the stream: what was held back of a whole answer is certain now. Of one that broke the rest
        may yet come, from another engine."""
        if finish.reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH):
            self._flush()
            if self.is_stopped:
                self._end_early()
                return
            self._flush_parser()
        ending = self._ending(self._reason_after_calls(finish.reason))
        ending.error, ending.retriable, ending.cause = finish.error[:MAX_ERROR_CHARS], finish.retriable, finish.cause
        if finish.HasField("work"):
            ending.work.CopyFrom(finish.work)
        if finish.stop_token_id in self._plan.reported_ids and finish.HasField("stop_token_id"):
            ending.stop_token_id = finish.stop_token_id
        self._end(ending)

    def cancel(self) -> None:
        self._end(self._ending(common_pb2.FINISH_REASON_CANCELLED))

    def fail(self, error: str, *, cause: LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED) -> None:
        """With a cause, another replica may go on with it."""
        ending = self._ending(common_pb2.FINISH_REASON_ERROR)
        ending.error, ending.cause = error[:MAX_ERROR_CHARS], cause
        ending.retriable = cause != common_pb2.LOSS_CAUSE_UNSPECIFIED
        self._end(ending)

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete, or the only call that was allowed."""
        return (self._matcher is not None and self._matcher.hit is not None) or (
            self._parser is not None and self._parser.is_over
        )

    def _end_early(self) -> None:
        """By what the text says, whatever the engine would go on with."""
        self._flush_parser()
        ending = self._ending(self._reason_after_calls(common_pb2.FINISH_REASON_STOP))
        if self._matcher is not None and self._matcher.hit is not None:
            ending.stop_string = self._matcher.hit
        self._end(ending)

    def _flush(self) -> None:
        """Sends what may have been half a character, or half a stop string."""
        tail = self._detokenizer.flush()
        if self._matcher is not None:
            tail = self._matcher.push(tail)
            tail += self._matcher.flush()
        if tail:
            self._send((), tail)

    def _flush_parser(self) -> None:
        if self._parser is not None and (parts := self._parser.flush()) != Parts():
            self._send_parts((), parts, 0)

    def _reason_after_calls(self, reason: FinishReason.ValueType) -> FinishReason.ValueType:
        parser, plan = self._parser, self._plan
        if reason != common_pb2.FINISH_REASON_STOP or parser is None or not parser.has_called:
            return reason
        assert plan.answer_format is not None
        return reason if plan.answer_format.named_call else common_pb2.FINISH_REASON_TOOL_CALLS

    def _ending(self, reason: FinishReason.ValueType) -> OutputFinish:
        return OutputFinish(
            stream_id=self.stream_id,
            reason=reason,
            num_output_tokens=self._next_index,
            num_reasoning_tokens=self._num_reasoning_tokens,
        )

    def _end(self, ending: OutputFinish) -> None:
        if not self.ended:
            self.ended = True
            reason = common_pb2.FinishReason.Name(ending.reason).removeprefix("FINISH_REASON_").lower()
            output_metrics.FINISHES.labels(reason).inc()
            self.outbox.add_finish(ending)
            self._on_end(self)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
