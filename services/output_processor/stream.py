"""One choice of a request: tokens in, text out to its gateway. Knows nothing about connections."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol

from headwater.proto import common_pb2
from headwater.proto.common_pb2 import (
    Embedding,
    FinishReason,
    LossCause,
    TokenLogprob,
    ToolCallDelta,
)
from headwater.proto.engine_pb2 import Finish, PromptLogprobs, Start
from headwater.proto.output_processor_pb2 import OutputFinish, OutputPromptLogprobs, RowParts

from ..answers.parser import call_id
from ..answers.parts import CallDelta, Parts
from ..runtime.unforeseen import unforeseen
from . import metrics as output_metrics
from .parsed_answer import ParsedAnswer
from .stops import StopMatcher
from .text_plan import TextPlan
from .token_logprobs import Entry, prompt_parts, token_logprob

CREDIT_SLACK = 256
"""Number of tokens past its credit that a stream may get: an engine plans some steps ahead."""
MAX_ERROR_CHARS = 4096
MAX_TEXT_CHARS = 8192
"""Largest number of characters in one row; longer text (that was held back, or is resumed) takes
several rows."""


class Sink(Protocol):
    """Destination of a stream's output: a gateway's frames, or a log."""

    def add_row(
        self,
        stream_id: int,
        first: int,
        token_ids: Sequence[int],
        text: str,
        offset: int,
        num_bytes: int,
        /,
    ) -> None:
        """Adds tokens and the text that they make certain, of `num_bytes` in UTF-8."""

    def add_logprobs(self, tokens: Iterable[TokenLogprob], /) -> None:
        """Adds the log probabilities of the row that was added last."""

    def add_parts(self, parts: RowParts, /) -> None:
        """Adds the parts besides content of the row that was added last."""

    def add_start(self, start: Start, /) -> None: ...

    def add_embedding(self, embedding: Embedding, /) -> None: ...

    def add_prompt_part(self, part: OutputPromptLogprobs, /) -> None: ...

    def add_finish(self, finish: OutputFinish, /) -> None: ...


P = ParamSpec("P")
Step = Callable[Concatenate["OutputStream", P], None]


def _contained(step: Step[P]) -> Step[P]:
    """Ends the stream where `step` raises an error that no code foresaw. The session goes on for
    other streams: if it ended, the request would go to the next engine and end that engine's
    session too."""

    @functools.wraps(step)
    def contained(stream: OutputStream, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(stream, *args, **kwargs)
        except Exception:
            stream.fail_unforeseen()

    return contained


class OutputStream:
    """Adds its output to `sink` under `sink_id`, calls `on_end` once when it ends, and adds nothing
    afterwards."""

    __slots__ = (
        "_answer",
        "_detokenizer",
        "_granted",
        "_matcher",
        "_next_index",
        "_num_reasoning_tokens",
        "_offset",
        "_plan",
        "_replayed",
        "_sink",
        "_sink_id",
        "cached_tokens",
        "choice_index",
        "ended",
        "on_end",
    )

    def __init__(
        self, sink: Sink, sink_id: int, plan: TextPlan, credit: int, choice_index: int = 0
    ) -> None:
        self.choice_index = choice_index
        self.on_end: Callable[[], None] | None = None
        self._sink = sink
        self._sink_id = sink_id
        self._plan = plan
        self._detokenizer = plan.new_detokenizer()
        self._answer: ParsedAnswer | None = None
        """Reader of an answer of which not all is content."""
        self._matcher: StopMatcher | None = None
        """Finder of stop strings in an answer that is content only."""
        if plan.answer_format is not None:
            self._answer = ParsedAnswer(plan.answer_format, plan.stops)
        elif plan.stops is not None:
            self._matcher = StopMatcher(plan.stops)
        self._num_reasoning_tokens = 0
        self._next_index = 0
        self._offset = 0
        """Number of UTF-8 bytes of text so far."""
        self._granted = credit + CREDIT_SLACK
        self._replayed: list[tuple[int, bytes]] = []
        """(number of tokens, text that they made certain) of each replayed row."""
        self.ended = False
        self.cached_tokens = 0
        """Number of tokens of its prompt that the engine found cached."""

    def push(
        self,
        first: int,
        token_ids: list[int],
        entries: Mapping[int, Entry] | None = None,
        position: int = 0,
    ) -> None:
        """Takes tokens from output index `first` on; `entries` has their log probabilities from
        `position` on."""
        # Like `_contained`, inlined to save a call for every row.
        try:
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
        except Exception:
            self.fail_unforeseen()

    @property
    def _most_row_tokens(self) -> int:
        """Largest number of tokens in a row of a frame. It is 1 where the answer is parsed: each
        token can end it, and an engine that drafts sends several tokens at once."""
        return self._plan.max_row_tokens if self._answer is None else 1

    def _push_row(
        self, token_ids: list[int], entries: Mapping[int, Entry] | None, position: int
    ) -> None:
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
        """Number of the tokens that count, and the text that they make certain."""
        num_spelled = len(token_ids)
        if token_ids[-1] in self._plan.silent_ids:
            num_spelled -= 1
        if self._matcher is None:
            spelled = token_ids if num_spelled == len(token_ids) else token_ids[:num_spelled]
            return len(token_ids), self._detokenizer.push_all(spelled)
        text = ""
        for i in range(num_spelled):
            piece = self._detokenizer.push(token_ids[i])
            text += (
                piece if self._next_index + i < self._plan.min_tokens else self._matcher.push(piece)
            )
            if self._matcher.hit is not None:
                return i + 1, text
        return len(token_ids), text

    def _send(self, token_ids: Sequence[int], text: str) -> None:
        """Adds a row; of a long text, the part that does not fit goes ahead of the tokens."""
        if self._answer is not None:
            is_searched = self._next_index >= self._plan.min_tokens
            parts = self._answer.push(text, is_searched=is_searched)
            self._num_reasoning_tokens += len(token_ids) if self._answer.is_reasoning else 0
            self._send_parts(token_ids, parts, _num_bytes(text))
            return
        while len(text) > MAX_TEXT_CHARS:
            self._send_row((), text[:MAX_TEXT_CHARS])
            text = text[MAX_TEXT_CHARS:]
        self._send_row(token_ids, text)

    def _send_row(self, token_ids: Sequence[int], text: str) -> None:
        num_bytes = _num_bytes(text)
        self._sink.add_row(
            self._sink_id, self._next_index, token_ids, text, self._offset, num_bytes
        )
        self._offset += num_bytes

    def _send_parts(self, token_ids: Sequence[int], parts: Parts, num_bytes: int) -> None:
        """Adds the parts of a text of `num_bytes`; the last row counts all of these bytes."""
        *ahead, last = parts.within(MAX_TEXT_CHARS)
        for part in ahead:
            self._send_part((), part, 0)
        self._send_part(token_ids, last, num_bytes)

    def _send_part(self, token_ids: Sequence[int], part: Parts, num_bytes: int) -> None:
        content_bytes = _num_bytes(part.content)
        self._sink.add_row(
            self._sink_id, self._next_index, token_ids, part.content, self._offset, content_bytes
        )
        self._offset += num_bytes
        if not part.is_plain or content_bytes != num_bytes:
            calls = list(self._named(part.calls))
            self._sink.add_parts(
                RowParts(num_bytes=num_bytes, reasoning=part.reasoning, tool_calls=calls)
            )

    def _named(self, calls: Sequence[CallDelta]) -> Iterator[ToolCallDelta]:
        plan = self._plan
        assert plan.answer_format is not None
        for call in calls:
            # A call begins with its name.
            name_of = (
                call_id(plan.answer_format, plan.request_id, self.choice_index, call.index)
                if call.name
                else ""
            )
            field = {"input" if call.is_text else "arguments": call.arguments}
            yield ToolCallDelta(index=call.index, id=name_of, name=call.name, **field)

    def _send_logprobs(
        self, token_ids: Sequence[int], entries: Mapping[int, Entry], position: int
    ) -> None:
        """Adds log probabilities to the row that was sent last."""
        table = self._plan.table
        silent = self._plan.silent_ids
        shows = self._detokenizer.shows
        scored = ((token_id, entries.get(position + i)) for i, token_id in enumerate(token_ids))
        self._sink.add_logprobs(
            [
                token_logprob(
                    table, token_id, entry, is_hidden=token_id in silent or not shows(token_id)
                )
                for token_id, entry in scored
                if entry is not None
            ]
        )

    @_contained
    def replay(self, token_ids: list[int]) -> None:
        """Takes tokens that an earlier attempt has delivered: they make text, but nothing is
        sent."""
        if self.is_stopped:
            return
        # Where reasoning tokens are counted, it matters which token's text is reasoning.
        rows = [token_ids] if self._answer is None else [[token_id] for token_id in token_ids]
        try:
            for row in rows:
                num_used, text = self._spell(row)
                self._next_index += num_used
                self._granted += num_used
                self._replayed.append((num_used, text.encode()))
        except IndexError:
            self.fail(f"an id of {token_ids} is outside the vocabulary")

    @_contained
    def resume(self, delivered_bytes: int) -> None:
        """Goes on after the replay, with the text that the gateway does not have yet."""
        num_spelled = sum(len(text) for _, text in self._replayed)
        if delivered_bytes > num_spelled:
            self.fail(
                f"delivered_bytes is {delivered_bytes}; allowed: 0…{num_spelled}, what "
                "output_ids spell"
            )
            return
        self._offset = delivered_bytes
        parts, num_bytes = self._undelivered(delivered_bytes)
        if num_bytes and self._answer is not None:
            self._send_parts((), parts, num_bytes)
        elif num_bytes:
            self._send((), parts.content)
        if self.is_stopped:
            self._end_early()

    def _undelivered(self, num_delivered: int) -> tuple[Parts, int]:
        """Parts of the replayed text after its first `num_delivered` bytes, and the number of bytes
        that they have."""
        undelivered = Parts()
        num_bytes = 0
        num_read = 0
        for num_tokens, spelled in self._replayed:
            delivered = spelled[:num_delivered].decode(errors="ignore")
            rest = spelled[num_delivered:].decode(errors="ignore")
            num_delivered = max(0, num_delivered - len(spelled))
            num_bytes = num_bytes + _num_bytes(rest)
            if self._answer is None:
                undelivered.add(Parts(rest))
                continue
            # The gateway has the parts of the delivered text: only the reader's state is of use.
            is_searched = num_read >= self._plan.min_tokens
            self._answer.push(delivered, is_searched=is_searched)
            if rest:
                undelivered.add(self._answer.push(rest, is_searched=is_searched))
            self._num_reasoning_tokens += num_tokens if self._answer.is_reasoning else 0
            num_read += num_tokens
            if self._answer.is_over:
                self._next_index = num_read
                break
        self._replayed = []
        return undelivered, num_bytes

    def grant(self, tokens: int) -> None:
        self._granted += tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its answer so far."""
        return self._next_index

    @property
    def credit(self) -> int:
        """Output index up to which tokens may come."""
        return self._granted - CREDIT_SLACK

    def start(self, start: Start) -> None:
        start.stream_id = self._sink_id
        self.cached_tokens = start.cached_tokens
        self._sink.add_start(start)

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        for each in prompt_parts(self._plan.table, part, self._sink_id):
            self._sink.add_prompt_part(each)

    def add_embedding(self, embedding: Embedding) -> None:
        embedding.stream_id = self._sink_id
        self._sink.add_embedding(embedding)

    @_contained
    def finish(self, finish: Finish) -> None:
        """Ends the stream because the engine did: text of a whole answer that was held back is
        certain now. An answer that broke may go on at another engine."""
        if finish.reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH):
            self._flush()
            if self.is_stopped:
                self._end_early()
                return
        ending = self._ending(self._reason_after_calls(finish.reason))
        ending.error = finish.error[:MAX_ERROR_CHARS]
        ending.retriable = finish.retriable
        ending.cause = finish.cause
        ending.retry_seconds = finish.retry_seconds
        if finish.HasField("work"):
            ending.work.CopyFrom(finish.work)
        if finish.stop_token_id in self._plan.reported_ids and finish.HasField("stop_token_id"):
            ending.stop_token_id = finish.stop_token_id
        self._end(ending)

    def cancel(self) -> None:
        self._end(self._ending(common_pb2.FINISH_REASON_CANCELLED))

    def fail(
        self, error: str, *, cause: LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED
    ) -> None:
        """Ends it with an error. With a cause, another replica may go on with it."""
        ending = self._ending(common_pb2.FINISH_REASON_ERROR)
        ending.error = error[:MAX_ERROR_CHARS]
        ending.cause = cause
        ending.retriable = cause != common_pb2.LOSS_CAUSE_UNSPECIFIED
        self._end(ending)

    def fail_unforeseen(self) -> None:
        """Ends the stream with the error that is being handled."""
        fault = sys.exception()
        assert fault is not None
        unforeseen.add(fault, "a stream's text cannot be made", choice=self.choice_index)
        self.fail("an internal fault; the log has it")

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete, or the only call that was allowed."""
        return self._stop_string is not None or (self._answer is not None and self._answer.is_over)

    @property
    def _stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        reader = self._answer or self._matcher
        return reader.hit if reader is not None else None

    def _end_early(self) -> None:
        """Ends the stream because of its text, while the engine still computes it."""
        self._flush_answer()
        ending = self._ending(self._reason_after_calls(common_pb2.FINISH_REASON_STOP))
        if self._stop_string is not None:
            ending.stop_string = self._stop_string
        self._end(ending)

    def _flush(self) -> None:
        """Sends text that was held back as half a character, half a stop string or half a mark of
        the format."""
        tail = self._detokenizer.flush()
        if self._matcher is not None:
            tail = self._matcher.push(tail)
            tail += self._matcher.flush()
        if tail:
            self._send((), tail)
        self._flush_answer()

    def _flush_answer(self) -> None:
        """Sends the parts of a format that were held back."""
        if self._answer is not None and (parts := self._answer.flush()) != Parts():
            self._send_parts((), parts, 0)

    def _reason_after_calls(self, reason: FinishReason.ValueType) -> FinishReason.ValueType:
        """Finish reason of an answer that ended for `reason`. A call that is cut off counts as
        text, so that no client runs it."""
        answer = self._answer
        plan = self._plan
        if reason != common_pb2.FINISH_REASON_STOP or answer is None or not answer.has_called:
            return reason
        assert plan.answer_format is not None
        if plan.answer_format.named_call or answer.has_cut_call:
            return reason
        return common_pb2.FINISH_REASON_TOOL_CALLS

    def _ending(self, reason: FinishReason.ValueType) -> OutputFinish:
        return OutputFinish(
            stream_id=self._sink_id,
            reason=reason,
            num_output_tokens=self._next_index,
            num_reasoning_tokens=self._num_reasoning_tokens,
            has_cut_call=self._answer is not None and self._answer.has_cut_call,
        )

    def _end(self, ending: OutputFinish) -> None:
        if not self.ended:
            self.ended = True
            reason = (
                common_pb2.FinishReason.Name(ending.reason).removeprefix("FINISH_REASON_").lower()
            )
            output_metrics.FINISHES.labels(reason).inc()
            self._sink.add_finish(ending)
            if self.on_end is not None:
                self.on_end()


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
